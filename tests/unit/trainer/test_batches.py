"""What a group must be to be trained on."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
from rlharvest.spans import ids_bytes
from rlharvest.testing.batches import random_group
from rlharvest.v1 import batches_pb2, spans_pb2
from rlharvest_trainer.batches import BadGroup, decode_group

Spoil = Callable[[batches_pb2.BatchGroup], None]


def decode(message: batches_pb2.BatchGroup, *, mask_truncated: bool = False):  # type: ignore[no-untyped-def]  # a test's shorthand
    return decode_group(message, vocab=32, scale_rewards=True, mask_truncated=mask_truncated)


def _set(name: str, value: object) -> Spoil:
    return lambda group: setattr(group.samples[1], name, value)


UNFIT = "log-probability that is not finite or above 0"
SPOILED: dict[str, tuple[Spoil, str]] = {
    "a reward that is no number": (_set("reward", math.nan), "reward nan"),
    "an infinite reward": (_set("reward", -math.inf), "reward -inf"),
    "a logprob that is no number": (_set("logprobs", struct.pack("<2f", -1.0, math.nan)), UNFIT),
    "a positive logprob": (_set("logprobs", struct.pack("<2f", -1.0, 0.1)), UNFIT),
    "an id outside the vocabulary": (_set("ids", ids_bytes([1, 32])), "id 32, outside the vocabulary of 32"),
    "torn ids": (_set("ids", b"abc"), "not a multiple of 4"),
    "no prompt": (lambda group: group.ClearField("prompt_ids"), "prompt is empty"),
    "no responses": (lambda group: group.ClearField("samples"), "no responses"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_bad_value_is_refused_with_its_group(case: str) -> None:
    spoil, said = SPOILED[case]
    message = random_group(0, group=5, n=4, vocab=32, lengths=(2, 2))
    spoil(message)
    with pytest.raises(BadGroup) as refused:
        decode(message)
    assert refused.value.group == 5
    assert "group 5" in str(refused.value)
    assert said in str(refused.value)


def test_runs_must_cover_the_tokens() -> None:
    message = random_group(0, group=0, n=2, vocab=32)
    message.samples[0].run_n[0] += 1
    with pytest.raises(BadGroup, match="version runs"):
        decode(message)


def test_a_masked_response_counts_in_the_baseline_and_not_in_the_loss() -> None:
    message = random_group(0, group=0, n=3, vocab=32)
    for sample, reward in zip(message.samples, (0.0, 0.0, 3.0), strict=True):
        sample.reward = reward
    message.samples[2].masked = True
    group = decode(message)
    assert [sample.in_loss for sample in group.samples] == [True, True, False]
    assert group.samples[0].advantage == pytest.approx(-1.0 / (math.sqrt(3.0) + 1e-4))


def test_truncated_responses_are_masked_only_when_the_job_says_so() -> None:
    message = random_group(0, group=0, n=3, vocab=32)
    for sample, finish in zip(
        message.samples, (spans_pb2.FINISH_EOS, spans_pb2.FINISH_LENGTH, spans_pb2.FINISH_STOP), strict=True
    ):
        sample.finish = finish
    assert [sample.in_loss for sample in decode(message).samples] == [True] * 3
    assert [sample.in_loss for sample in decode(message, mask_truncated=True).samples] == [True, False, True]
    assert decode(message).clipped == 1


def test_samples_come_in_the_order_of_their_handles_with_the_ids_as_they_were_sent() -> None:
    message = random_group(0, group=2, n=4, vocab=32)
    sent = {sample.handle: sample.ids for sample in message.samples}
    shuffled = list(message.samples)[::-1]
    del message.samples[:]
    message.samples.extend(shuffled)
    group = decode(message)
    assert [sample.handle for sample in group.samples] == [8, 9, 10, 11]
    assert all(ids_bytes(sample.ids) == sent[sample.handle] for sample in group.samples)
