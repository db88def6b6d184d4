"""From a job to a learner: models loaded, the newest checkpoint restored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from rlharvest import confinement, disk
from rlharvest.errors import CorruptData, InvalidField
from rlharvest.jobs.model import JobSpec

from rlharvest_trainer import checkpoints, model, versions
from rlharvest_trainer.checkpoints import Checkpoints, State
from rlharvest_trainer.losses import Objective
from rlharvest_trainer.optimizer import AdamWConfig
from rlharvest_trainer.step import Learner, StepConfig

RANDOM_STATE = "random.cpu"

TOKENIZER = ".tokenizer"
"""Directory beside the checkpoints that keeps the tokenizer as it was when the job was loaded."""

_LARGEST_FILE = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a run starts from."""

    learner: Learner
    tokenizer: Path
    """Directory that the tokenizer's files are copied from."""
    vocab: int
    """Ids at or above cannot be sampled."""
    resumed: State | None
    path: Path | None
    """Of the checkpoint that was resumed from."""


def prepare(
    job: str,
    spec: JobSpec,
    saved: Checkpoints,
    *,
    attention: model.Attention,
    device: torch.device,
    roots: Sequence[Path] | None = None,
) -> Prepared:
    """Load the job's model, or its newest checkpoint. Blocking; call it on the computing thread.

    Args:
        roots: directories that the files of the model must lie in; None: any.

    Raises:
        InvalidField: names what of the job cannot be trained.
        CorruptData: the newest checkpoint's tensors do not fit the model.
        Conflict: the directory holds checkpoints of another job.
    """
    if spec.sampling.temperature == 0:
        raise InvalidField(
            "sampling.temperature", 0, "greedy samples have no log-probabilities to learn from", "Use 1.0."
        )
    torch.manual_seed(spec.seed)
    torch.use_deterministic_algorithms(spec.deterministic)
    # It would fill every new tensor; nothing here reads one that was not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # made by a metaclass
    algorithm = spec.algorithm
    initial = Path(spec.model)
    tokenizer = Path(spec.tokenizer or spec.model)
    if roots is not None:
        _confine(initial, "model", roots)
        tokenizer = _own_copy(tokenizer, saved.root / TOKENIZER, roots)
    found = saved.newest(job)
    source, field = (found[0], "checkpoint") if found else (initial, "model")
    policy = model.load(source, dtype=algorithm.dtype, attention=attention, device=device, field=field)
    reference = None
    if algorithm.beta > 0:
        reference = model.load(initial, dtype=algorithm.dtype, attention=attention, device=device)
        reference.requires_grad_(False)
    vocab = model.vocabulary(policy, tokenizer)
    learner = Learner(
        policy,
        StepConfig(
            objective=Objective(
                epsilon=algorithm.epsilon,
                epsilon_high=algorithm.epsilon if algorithm.epsilon_high is None else algorithm.epsilon_high,
                beta=algorithm.beta,
            ),
            adamw=AdamWConfig(
                beta1=algorithm.adam_beta1,
                beta2=algorithm.adam_beta2,
                weight_decay=algorithm.weight_decay,
                max_grad_norm=algorithm.max_grad_norm,
            ),
            temperature=spec.sampling.temperature,
            vocab=vocab,
            micro_batch_tokens=algorithm.micro_batch_tokens,
        ),
        reference=reference,
    )
    if found:
        tensors = checkpoints.tensors(found[0])
        random_state = tensors.pop(RANDOM_STATE, None)
        if random_state is None:
            raise CorruptData(f"{found[0]}: the state lacks {RANDOM_STATE!r}")
        torch.set_rng_state(random_state)
        learner.optimizer.restore(tensors)
    return Prepared(
        learner=learner,
        tokenizer=tokenizer,
        vocab=vocab,
        resumed=found[1] if found else None,
        path=found[0] if found else None,
    )


def _confine(directory: Path, field: str, roots: Sequence[Path]) -> None:
    allowed = [*roots, Path(HF_HUB_CACHE)]
    leads_out = confinement.strays(directory, allowed)
    if leads_out or not confinement.inside(directory, allowed):
        problem = f"{leads_out[0]} is a link that leads" if leads_out else "it lies"
        raise InvalidField(
            field,
            str(directory),
            f"{problem} outside of the trainer's roots ({', '.join(map(str, roots))})",
            "Copy it there, or add its directory to RLHARVEST_ROOTS of the trainer.",
        )


def _own_copy(source: Path, target: Path, roots: Sequence[Path]) -> Path:
    """Copy the tokenizer's files, which go into each version as they are: what a job's directory becomes later does not."""
    allowed = [*roots, Path(HF_HUB_CACHE)]
    with disk.naming(target):
        target.mkdir(parents=True, exist_ok=True)
        for name in versions.TOKENIZER_FILES:
            (target / name).unlink(missing_ok=True)
            if (source / name).exists():
                try:
                    content = confinement.read(source / name, allowed, most=_LARGEST_FILE)
                except CorruptData as error:
                    raise InvalidField("tokenizer", str(source), str(error), "Copy the file into it.") from error
                (target / name).write_bytes(content)
    return target


def state_tensors(learner: Learner) -> dict[str, torch.Tensor]:
    """Return everything of a learner that a checkpoint keeps besides the model."""
    return learner.optimizer.state() | {RANDOM_STATE: torch.get_rng_state()}
