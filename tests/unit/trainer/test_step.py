"""One optimizer step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
import torch
from rlharvest_trainer.batches import Group
from rlharvest_trainer.losses import Objective, clipped_loss
from rlharvest_trainer.model import parameters
from rlharvest_trainer.step import Interrupted, Learner, StepConfig

Maker = Callable[..., object]


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in parameters(learner.model).items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def reference_gradients(
    model: torch.nn.Module, groups: list[Group], rule: Objective, temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """One response at a time, without padding, in float64."""
    model = model.double()
    model.zero_grad()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        for sample in group.samples:
            if not sample.in_loss:
                continue
            ids = torch.tensor(np.concatenate([sample.prompt, sample.ids]).astype(np.int64))[None]
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0] / temperature, -1)
            at = torch.arange(len(sample.prompt) - 1, sample.length - 1)
            policy = logprobs[at, ids[0, at + 1]]
            behaviour = torch.tensor(sample.logprobs, dtype=torch.float64)
            advantage = torch.full_like(policy, sample.advantage)
            total = total + clipped_loss(policy, behaviour, advantage, rule).loss
            tokens += len(sample.ids)
    (total / tokens).backward()
    return {name: tensor.grad for name, tensor in parameters(model).items() if tensor.grad is not None}


@pytest.mark.parametrize("budget", [1, 40, 100_000])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_accumulated_micro_batches_give_the_gradient_of_one_big_batch(
    make_model: Maker, make_group: Maker, step_config: Maker, budget: int, temperature: float
) -> None:
    groups = [make_group(at) for at in range(5)]
    learner = Learner(make_model(), step_config(budget=budget, temperature=temperature))
    seen: dict[str, torch.Tensor] = {}
    stepper = learner.optimizer._adamw.step
    learner.optimizer._adamw.step = lambda: (  # type: ignore[method-assign]
        seen.update({n: p.grad.clone() for n, p in parameters(learner.model).items()}),
        stepper(),
    )
    for group in groups:
        learner.accumulate([group])
    result = learner.apply(1e-3)
    expected = reference_gradients(make_model(), groups, learner.config.objective, temperature)
    assert result.applied
    assert set(seen) == set(expected)
    for name, gradient in expected.items():
        assert torch.allclose(seen[name].double(), gradient, atol=2e-6, rtol=1e-4), name


def test_the_order_of_arrival_changes_nothing_when_the_whole_batch_comes_at_once(
    make_model: Maker, make_group: Maker, step_config: Maker
) -> None:
    groups = [make_group(at) for at in range(4)]
    results = []
    for order in list(permutations(range(4)))[::5]:
        learner = Learner(make_model(), step_config())
        learner.accumulate([groups[at] for at in order])
        learner.apply(1e-2)
        results.append(weights(learner))
    assert all(equal(results[0], other) for other in results)


def test_streaming_gives_the_loss_of_the_whole_batch_within_1e_4(
    make_model: Maker, make_group: Maker, step_config: Maker
) -> None:
    whole, streamed = Learner(make_model(), step_config()), Learner(make_model(), step_config())
    for step in range(5):
        groups = [make_group(at, seed=step) for at in range(4)]
        whole.accumulate(groups)
        for group in groups[::-1]:
            streamed.accumulate([group])
        a, b = whole.apply(1e-3), streamed.apply(1e-3)
        assert a.metrics["loss"] == pytest.approx(b.metrics["loss"], abs=1e-4)


def on_policy(learner: Learner, group: Group) -> Group:
    """Return the group with the learner's own log-probabilities as the behaviour's."""
    samples = []
    for sample in group.samples:
        with torch.no_grad():
            _, policy, _ = learner.logprobs([sample])
        samples.append(dataclasses.replace(sample, logprobs=policy.numpy()))
    return dataclasses.replace(group, samples=tuple(samples))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_the_sampling_policy_s_own_logprobs_give_ratio_one(
    make_model: Maker, make_group: Maker, step_config: Maker, temperature: float
) -> None:
    learner = Learner(make_model(), step_config(temperature=temperature))
    learner.accumulate([on_policy(learner, make_group(at)) for at in range(3)])
    metrics = learner.apply(0.0).metrics
    for name in ("min", "mean", "max"):
        assert metrics[f"sampling/importance_sampling_ratio/{name}"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-5
    assert metrics["clip_ratio/region_mean"] == 0.0


def test_a_wrong_temperature_shows_in_the_ratio(make_model: Maker, make_group: Maker, step_config: Maker) -> None:
    sampler = Learner(make_model(), step_config(temperature=0.5))
    trainer = Learner(make_model(), step_config(temperature=1.0))
    trainer.accumulate([on_policy(sampler, make_group(0))])
    assert trainer.apply(0.0).metrics["sampling/sampling_logp_difference/mean"] > 0.05


def test_masked_samples_do_not_touch_the_gradient(make_model: Maker, make_group: Maker, step_config: Maker) -> None:
    group = make_group(0)
    masked = dataclasses.replace(
        group, samples=tuple(dataclasses.replace(s, in_loss=at < 2) for at, s in enumerate(group.samples))
    )
    without = dataclasses.replace(group, samples=group.samples[:2])
    results = []
    for given in (masked, without):
        learner = Learner(make_model(), step_config())
        learner.accumulate([given])
        learner.apply(1e-2)
        results.append(weights(learner))
    assert equal(*results)


def test_the_kl_term_is_zero_at_the_reference_and_pulls_back_to_it(
    make_model: Maker, make_group: Maker, step_config: Maker
) -> None:
    learner = Learner(make_model(), step_config(beta=0.5), reference=make_model())
    learner.accumulate([make_group(0)])
    assert learner.apply(1e-2).metrics["kl"] == 0.0
    flat = make_group(1)
    flat = dataclasses.replace(
        flat, samples=tuple(dataclasses.replace(sample, advantage=0.0) for sample in flat.samples)
    )
    found = []
    for _ in range(30):
        learner.accumulate([flat])
        found.append(learner.apply(3e-3).metrics["kl"])
    assert found[0] > 0
    assert min(found[-5:]) < found[0] / 2


def test_equal_rewards_without_kl_change_nothing(make_model: Maker, make_group: Maker, step_config: Maker) -> None:
    group = make_group(0)
    flat = dataclasses.replace(group, samples=tuple(dataclasses.replace(s, advantage=0.0) for s in group.samples))
    learner = Learner(make_model(), step_config(weight_decay=0.1))
    before = weights(learner)
    learner.accumulate([flat])
    result = learner.apply(1e-2)
    assert result.applied
    assert result.metrics["grad_norm"] == 0.0
    assert equal(before, weights(learner))


@pytest.mark.parametrize("where", ["logits", "gradient"])
def test_what_is_not_finite_never_reaches_the_optimiser(
    make_model: Maker, make_group: Maker, step_config: Maker, where: str
) -> None:
    learner = Learner(make_model(), step_config(budget=1))
    learner.accumulate([make_group(0)])
    learner.apply(1e-2)
    before, moments = weights(learner), {n: t.clone() for n, t in learner.optimizer.state().items()}
    learner.accumulate([make_group(1)])
    if where == "logits":
        whole = learner.model.forward

        def poisoned(**given: torch.Tensor) -> object:
            reply = whole(**given)
            reply.logits = reply.logits * math.nan
            return reply

        learner.model.forward = poisoned
        learner.accumulate([make_group(7)])
        learner.model.forward = whole
    else:
        next(iter(parameters(learner.model).values())).grad.view(-1)[0] = math.inf
    learner.accumulate([make_group(2)])
    result = learner.apply(1e-2)
    assert not result.applied
    assert "not finite" in result.problem
    assert result.suspects == ((7,) if where == "logits" else ())
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert equal(before, weights(learner))
    assert equal(moments, learner.optimizer.state())
    learner.accumulate([make_group(3)])
    assert learner.apply(1e-2).applied


def test_a_step_without_a_token_in_the_loss_changes_nothing(make_model: Maker, step_config: Maker) -> None:
    learner = Learner(make_model(), step_config())
    before = weights(learner)
    result = learner.apply(1e-2)
    assert not result.applied
    assert "no token" in result.problem
    assert equal(before, weights(learner))


def test_an_interrupted_step_leaves_nothing_behind(make_model: Maker, make_group: Maker, step_config: Maker) -> None:
    learner, fresh = Learner(make_model(), step_config(budget=1)), Learner(make_model(), step_config(budget=1))
    asked = iter([False, False, True])
    with pytest.raises(Interrupted):
        learner.accumulate([make_group(0)], stop=lambda: next(asked))
    for each in (learner, fresh):
        each.accumulate([make_group(1)])
        each.apply(1e-2)
    assert equal(weights(learner), weights(fresh))


def test_a_bfloat16_model_keeps_float32_masters(make_model: Maker, make_group: Maker, step_config: Maker) -> None:
    learner = Learner(make_model().to(torch.bfloat16), step_config())
    masters = learner.optimizer._masters
    before = {name: master.detach().clone() for name, master in masters.items()}
    for step in range(3):
        learner.accumulate([make_group(at, seed=step) for at in range(3)])
        assert learner.apply(1e-5).applied
    moved = [name for name in masters if not torch.equal(before[name], masters[name])]
    assert len(moved) == len(masters)
    for name, parameter in parameters(learner.model).items():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, masters[name].to(torch.bfloat16))


def test_a_sample_longer_than_the_budget_goes_alone(make_model: Maker, make_group: Maker, step_config: Maker) -> None:
    learner = Learner(make_model(), step_config(budget=16))
    widest = []
    whole = learner.model.forward

    def watching(**given: torch.Tensor) -> object:
        widest.append(tuple(given["input_ids"].shape))
        return whole(**given)

    learner.model.forward = watching
    learner.accumulate([make_group(0), make_group(1, lengths=(60, 60), n=2)])
    assert all(rows * columns <= 16 or rows == 1 for rows, columns in widest)
    assert sum(columns == 64 for _, columns in widest) == 2


def test_metrics_have_trl_s_names(make_model: Maker, make_group: Maker, step_config: Maker) -> None:
    learner = Learner(make_model(), step_config(beta=0.1), reference=make_model())
    learner.accumulate([make_group(0), make_group(1)])
    metrics = learner.apply(1e-3).metrics
    assert {
        "reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/min_length",
        "completions/max_length", "completions/clipped_ratio", "kl", "entropy", "clip_ratio/region_mean", "loss",
        "grad_norm", "learning_rate", "staleness/mean", "staleness/max",
        "sampling/importance_sampling_ratio/mean", "sampling/sampling_logp_difference/mean",
    } <= set(metrics)  # fmt: skip
    assert 0 < metrics["entropy"] <= math.log(32)


def test_the_config_needs_a_reference_for_its_kl_term(
    make_model: Maker, step_config: Callable[..., StepConfig]
) -> None:
    with pytest.raises(ValueError, match="reference"):
        Learner(make_model(), step_config(beta=0.1))
