"""Names that other tools use for the fields of a job, mapped to ours.

A name is taken as `section.key` anywhere below the top level of a job, e.g. `actor_rollout_ref.rollout.n: 8` written as
nested mappings or as one dotted key. Naming a field twice, by two names, is refused.
"""

from __future__ import annotations

from typing import Any

from rlharvest.errors import InvalidField

ALIASES: dict[str, str] = {
    # verl
    "actor_rollout_ref.rollout.n": "sampling.num_generations",
    "actor_rollout_ref.rollout.temperature": "sampling.temperature",
    "actor_rollout_ref.actor.clip_ratio": "algorithm.epsilon",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.epsilon",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.epsilon_high",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.beta",
    "actor_rollout_ref.actor.optim.lr": "algorithm.learning_rate",
    "actor_rollout_ref.model.path": "model",
    "data.train_files": "dataset.path",
    "data.prompt_key": "dataset.prompt_key",
    "data.max_prompt_length": "dataset.max_prompt_length",
    "data.max_response_length": "sampling.max_completion_length",
    "data.train_batch_size": "algorithm.prompts_per_step",
    "trainer.total_training_steps": "limits.max_steps",
    # OpenRLHF
    "rollout.n_samples_per_prompt": "sampling.num_generations",
    "actor.eps_clip": "algorithm.epsilon",
    "algo.kl.init_coef": "algorithm.beta",
    "data.input_key": "dataset.prompt_key",
    "data.label_key": "dataset.label_key",
    # AReaL
    "gconfig.n_samples": "sampling.num_generations",
    "gconfig.max_new_tokens": "sampling.max_completion_length",
    "gconfig.temperature": "sampling.temperature",
    "rollout.max_head_offpolicyness": "staleness.max_staleness",
    # prime-rl
    "orchestrator.max_off_policy_steps": "staleness.max_staleness",
    "orchestrator.group_size": "sampling.num_generations",
    # TRL, flat as GRPOConfig has them
    "num_generations": "sampling.num_generations",
    "max_completion_length": "sampling.max_completion_length",
    "temperature": "sampling.temperature",
    "learning_rate": "algorithm.learning_rate",
    "beta": "algorithm.beta",
    "epsilon": "algorithm.epsilon",
    "epsilon_high": "algorithm.epsilon_high",
    "max_grad_norm": "algorithm.max_grad_norm",
    "max_steps": "limits.max_steps",
    "max_staleness": "staleness.max_staleness",
}


def apply(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a job's mapping in which every known foreign name is replaced by ours.

    Raises:
        InvalidField: a field is named twice with two values.
    """
    result: dict[str, Any] = _copy(values)
    for alias, ours in ALIASES.items():
        found, value = _take(result, alias.split("."))
        if not found:
            found, value = (True, result.pop(alias)) if alias in result else (False, None)
        if found:
            _put(result, ours, value, alias)
    for key in [key for key in result if isinstance(key, str) and "." in key]:
        _put(result, key, result.pop(key), key)
    return result


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value


def _take(values: dict[str, Any], path: list[str]) -> tuple[bool, Any]:
    """Remove and return the value at `path`, with the mappings that it leaves empty."""
    key, *rest = path
    if key not in values:
        return False, None
    if not rest:
        return True, values.pop(key)
    if not isinstance(values[key], dict):
        return False, None
    found, value = _take(values[key], rest)
    if found and not values[key]:
        del values[key]
    return found, value


def _put(values: dict[str, Any], path: str, value: Any, alias: str) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise InvalidField(path, values, f"{parent!r} is not a mapping", f"Write `{parent}:` with keys below it.")
    if last in values and values[last] != value:
        raise InvalidField(path, value, f"given twice, as {alias!r} and as {path!r}", "Remove one of them.")
    values[last] = value
