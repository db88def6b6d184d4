"""The unmodified client of OpenAI samples from the workers of a running job."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rlharvest.testing.model import CHATML
from rlharvest.testing.served import CONTEXT, VOCAB, Expected, Served, encode, expected, seed_for, serving
from rlharvest.testing.system import System

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import openai

pytestmark = pytest.mark.timeout(600)

PROMPT = "12 and 30 are"
MOST = 8


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One system for all tests of this module."""
    settings = {"RLHARVEST_MOST_COMPLETIONS": str(MOST)}
    with (
        System(tmp_path_factory.mktemp("system"), workers=2, settings=settings) as system,
        serving(system, timeout_s=180) as served,
    ):
        yield served


def wanted_of(served: Served, prompt: str, *, seed: int, budget: int, place: int = 0) -> Expected:
    return expected(served.spec, encode(prompt), seed=seed, budget=budget, place=place)


def short(served: Served, prompt: str, **bounds: int) -> int:
    """Return a seed of a choice that ends by itself within 20 to 60 tokens."""
    return seed_for(served.spec, encode(prompt), **{"least": 20, "most": 60, **bounds})


def test_a_completion_is_what_the_engine_samples(served: Served) -> None:
    """Text, reason and counts of tokens, by the name of the job and by its id; ended by itself and by its budget."""
    seed = short(served, PROMPT)
    for model, budget in (("adder", 64), (served.job, 10)):
        wanted = wanted_of(served, PROMPT, seed=seed, budget=budget)
        answer = served.client.completions.create(
            model=model, prompt=PROMPT, max_tokens=budget, seed=seed, user="me", temperature=0.7
        )
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason, answer.model) == (wanted.text, wanted.reason, model)
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), len(wanted.ids))
    assert wanted_of(served, PROMPT, seed=seed, budget=64).reason == "stop"


def test_prompts_and_choices_come_in_order_with_their_token_ids(served: Served) -> None:
    """Two prompts as token ids, two choices each; what an agent loop trains on comes with them."""
    prompts = [encode("1+1="), encode("2+2=")]
    answer = served.client.completions.create(
        model="adder", prompt=prompts, max_tokens=12, n=2, seed=5, logprobs=0, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        at, place = divmod(choice.index, 2)
        wanted = expected(served.spec, prompts[at], seed=5 + at, budget=12, place=place)
        extra = choice.model_extra or {}
        assert (extra["prompt_token_ids"], extra["token_ids"]) == (prompts[at], wanted.ids)
        assert np.allclose(extra["token_logprobs"], wanted.logprobs)
        assert extra["version_runs"] == [{"n": len(wanted.ids), "version": 0}]
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert np.allclose(choice.logprobs.token_logprobs, wanted.logprobs)
        assert len(choice.logprobs.tokens or []) == len(choice.logprobs.text_offset or []) == len(wanted.ids)
        assert choice.text == wanted.text


def test_a_stream_is_the_completion_in_parts(served: Served) -> None:
    seed = short(served, PROMPT, n=2)
    chunks = list(
        served.client.completions.create(
            model="adder",
            prompt=PROMPT,
            max_tokens=64,
            n=2,
            seed=seed,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    )
    for place in range(2):
        wanted = wanted_of(served, PROMPT, seed=seed, budget=64, place=place)
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == place]
        assert "".join(part.text for part in parts) == wanted.text
        assert [id for part in parts for id in (part.model_extra or {})["token_ids"]] == wanted.ids
        assert [part.finish_reason for part in parts][-1] == wanted.reason
        assert not any(part.finish_reason for part in parts[:-1])
        assert [("prompt_token_ids" in (part.model_extra or {})) for part in parts] == [True] + [False] * len(parts[1:])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == len(PROMPT)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chat_goes_through_the_template_of_the_model(served: Served) -> None:
    """As a whole and as a stream, with log-probabilities."""
    assert "assistant" in CHATML
    ids = [VOCAB["<|im_start|>"], *encode("user\nhow many?"), VOCAB["<|im_end|>"], *encode("\n")]
    ids += [VOCAB["<|im_start|>"], *encode("assistant\n")]
    seed = seed_for(served.spec, ids, least=20, most=60)
    wanted = expected(served.spec, ids, seed=seed, budget=64)
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "how many?"}]}]
    answer = served.client.chat.completions.create(
        model="adder",
        messages=messages,
        seed=seed,
        logprobs=True,
        max_completion_tokens=64,
        extra_body={"return_token_ids": True},
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", wanted.text)
    assert choice.finish_reason == wanted.reason
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert np.allclose([token.logprob for token in choice.logprobs.content], wanted.logprobs)
    assert "".join(token.token for token in choice.logprobs.content).removesuffix("</s>") == wanted.text
    assert (answer.model_extra or {})["prompt_token_ids"] == ids
    with served.client.chat.completions.stream(model="adder", messages=messages, seed=seed, max_tokens=64) as stream:
        assert stream.get_final_completion().choices[0].message.content == wanted.text


def test_a_stop_string_ends_the_text_before_it(served: Served) -> None:
    """Its tokens are counted, its text is never shown, whole or streamed; the worker is told to stop."""
    seed = seed_for(served.spec, encode(PROMPT), least=3000, most=9999)
    long = wanted_of(served, PROMPT, seed=seed, budget=4000)
    stop = long.text[30:33]
    kept = long.text[: long.text.index(stop)]
    arguments: Any = {"model": "adder", "prompt": PROMPT, "max_tokens": 4000, "seed": seed, "stop": ["no such", stop]}
    answer = served.client.completions.create(**arguments)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (kept, "stop")
    assert answer.usage is not None
    chunks = list(served.client.completions.create(**arguments, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == kept
    served.until_idle()


def test_requests_that_cannot_be_done_name_field_value_and_fix(served: Served) -> None:
    create, chat = served.client.completions.create, served.client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as unknown:
        create(model="gpt-4", prompt="x")
    assert unknown.value.param == "model"
    assert "'gpt-4'" in unknown.value.message
    assert served.job in unknown.value.message
    wrong: list[tuple[str, Any]] = [
        ("prompt", lambda: create(model="adder", prompt=[1, len(VOCAB)])),
        ("prompt", lambda: create(model="adder", prompt="")),
        ("prompt", lambda: create(model="adder", prompt=[1] * (CONTEXT + 1))),
        ("max_tokens", lambda: create(model="adder", prompt="x", max_tokens=CONTEXT)),
        ("temperature", lambda: create(model="adder", prompt="x", temperature=-1)),
        ("logit_bias", lambda: create(model="adder", prompt="x", logit_bias={"1": 2})),
        ("echo", lambda: create(model="adder", prompt="x", echo=True)),
        ("logprobs", lambda: create(model="adder", prompt="x", logprobs=3)),
        ("n", lambda: create(model="adder", prompt="x", n=1000)),
        ("n", lambda: create(model="adder", prompt="x", n=MOST + 1)),
        ("stop", lambda: create(model="adder", prompt="x", stop=[""])),
        ("tepmerature", lambda: create(model="adder", prompt="x", extra_body={"tepmerature": 1})),
        ("messages", lambda: chat(model="adder", messages=[{"role": "user"}])),
        ("tools", lambda: chat(model="adder", messages=[], tools=[{"type": "function", "function": {"name": "f"}}])),
        ("top_logprobs", lambda: chat(model="adder", messages=[{"role": "user", "content": "x"}], top_logprobs=2)),
    ]
    for field, call in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            call()
        assert refused.value.param == field, refused.value.message
        assert field in refused.value.message
    stranger = openai.OpenAI(base_url=str(served.client.base_url), api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    stranger.close()
    assert [model.id for model in served.client.models.list()] == [served.job]
    assert served.client.models.retrieve("adder").id == served.job


def test_more_at_a_time_than_allowed_are_refused_with_when_to_come_again(served: Served) -> None:
    """And a client that goes away ends what was sampled for it, long before it would have ended by itself."""
    seed = seed_for(served.spec, encode(PROMPT), least=2000, most=9999, n=MOST)
    before = served.counters()
    stream = served.client.completions.create(
        model="adder", prompt=PROMPT, max_tokens=4000, n=MOST, seed=seed, stream=True
    )
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as refused:
        served.client.completions.create(model="adder", prompt="x")
    assert "RLHARVEST_MOST_COMPLETIONS" in refused.value.message
    assert refused.value.response.headers["Retry-After"]
    stream.close()
    served.until_idle()
    with pytest.raises(openai.APITimeoutError):
        served.client.with_options(timeout=2).completions.create(
            model="adder", prompt=PROMPT, max_tokens=4000, n=MOST, seed=seed
        )
    served.until_idle()
    after = served.counters()
    assert after["served_dropped"] - before.get("served_dropped", 0) == 2 * MOST
    assert after["served_tokens"] - before.get("served_tokens", 0) < 2 * MOST * 2000
    assert served.client.completions.create(model="adder", prompt="x", max_tokens=1).choices


def test_training_never_sees_what_is_served(served: Served) -> None:
    """Its counters hold its own two responses, its lists too; SQL has nothing of completions."""
    served.until_idle()
    counters = served.counters()
    assert counters["submitted"] == counters["outstanding"] == 2, counters
    assert counters["served_submitted"] == counters["served_retired"] + counters["served_dropped"] > 10
    assert {sample["handle"] for sample in served.system.client.live_samples(served.job)} == {0, 1}
    assert served.system.samples(served.job) == {}


def test_a_coordinator_that_stops_ends_streams_with_an_error_and_the_next_one_forgets_them(served: Served) -> None:
    """SIGTERM: an error event, no hanging connection. SIGKILL: what it had promised is dropped by its successor."""
    system, patient = served.system, served.client.with_options(max_retries=10)  # a restart is answered with 503
    seed = seed_for(served.spec, encode(PROMPT), least=3000, most=9999)
    arguments: Any = {"model": "adder", "prompt": PROMPT, "max_tokens": 4000, "seed": seed, "stream": True}
    stream = patient.completions.create(**arguments)
    next(iter(stream))
    system.coordinator.signal(15)
    with pytest.raises(openai.APIError, match="stops"):
        list(stream)
    system.coordinator.stop()
    system.coordinator.start()
    system.ready()
    served.until_idle()
    stream = patient.completions.create(**arguments)
    next(iter(stream))
    system.coordinator.kill()
    stream.close()
    system.coordinator.start()
    system.ready()
    served.until_idle()
    assert patient.completions.create(model="adder", prompt="x", max_tokens=1).choices


def test_a_job_that_does_not_run_says_so(served: Served) -> None:
    """A stream ends with an error when its job pauses; then requests are refused, paused and ended."""
    seed = seed_for(served.spec, encode(PROMPT), least=3000, most=9999)
    stream = served.client.completions.create(model="adder", prompt=PROMPT, max_tokens=4000, seed=seed, stream=True)
    next(iter(stream))
    served.system.client.pause(served.job)
    with pytest.raises(openai.APIError, match="The job is paus"):
        list(stream)
    served.system.wait(served.job, "paused", timeout_s=120)
    with pytest.raises(openai.BadRequestError, match=f"rlharvest resume {served.job}"):
        served.client.completions.create(model="adder", prompt="x")
    served.system.client.cancel(served.job)
    served.system.wait(served.job, "cancelled", timeout_s=120)
    served.system.until(
        lambda: served.system.job(served.job)["counters"]["outstanding"] == 0, timeout_s=60, what="the job to close"
    )
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        served.client.completions.create(model=served.job, prompt="x")
    counters = served.system.job(served.job)["counters"]
    assert counters["submitted"] == counters["dropped"] == 2, counters
