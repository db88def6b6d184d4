"""Validation of a job's inputs: model directory, tokenizer, dataset, rewards. The one entry point of this package.

Everything that can be wrong with them is found here, before any worker is touched, and is an `InvalidField`. The work
runs in a thread; the event loop stays free. The result depends on content alone, so preparing twice opens the same
tokenised dataset.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
from rlharvest.confinement import strays
from rlharvest.errors import CorruptData, InvalidField, NotFound
from rlharvest.jobs.model import JobSpec

from rlharvest_coordinator.data import hub, model_dir, reward_files, tokenizer
from rlharvest_coordinator.data.model_dir import ModelInfo
from rlharvest_coordinator.data.order import Order
from rlharvest_coordinator.data.paths import confine
from rlharvest_coordinator.data.prompts import Prompts
from rlharvest_coordinator.data.rows import Limits
from rlharvest_coordinator.data.sources import Source, open_source
from rlharvest_coordinator.data.store import TokenisedDataset, Writer
from rlharvest_coordinator.data.tokenizer import Tokenizer

_LAYOUT = "1"
"""Rises whenever the same inputs would give other files."""

Progress = Callable[[int], None]
"""Told how many rows are tokenised."""


class _Cancelled(Exception):
    """Whoever waited for the preparation went away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A job's inputs, checked."""

    dataset: TokenisedDataset
    order: Order
    tokenizer: Tokenizer
    model_dir: Path
    tokenizer_dir: Path | None
    """Where the job names another directory for the tokenizer."""
    context: int
    """Most tokens of a prompt and its response together."""
    rewards_digest: str
    report: dict[str, Any]
    """JSON: digest, format, rows, unique_prompts, kept, dropped by reason, tokens (min, median, max, total), ..."""


async def prepare(
    spec: JobSpec,
    *,
    roots: Sequence[Path],
    data_dir: Path,
    progress: Progress | None = None,
    limits: Limits | None = None,
) -> Prepared:
    """Check a job's inputs and tokenise its dataset into `data_dir/datasets/<digest>`, unless it is there.

    Cancelling this stops the work and leaves nothing behind. `progress` is called on the event loop.

    Raises:
        InvalidField: something that the job names cannot be used.
        DiskFull: the tokenised dataset does not fit.
    """
    loop = asyncio.get_running_loop()
    gone = threading.Event()

    def advance(rows: int) -> None:
        if gone.is_set():
            raise _Cancelled
        if progress is not None:
            loop.call_soon_threadsafe(progress, rows)

    try:
        return await asyncio.to_thread(_prepare, spec, roots, data_dir, advance, limits or Limits())
    except OSError as error:
        raise InvalidField(
            "job", error.filename, f"cannot be read or written ({error.strerror})", "Check permissions and the disk."
        ) from error
    finally:
        gone.set()


async def reopen(spec: JobSpec, report: dict[str, Any], *, roots: Sequence[Path], data_dir: Path) -> Prepared:
    """Open again what `prepare` made, without reading the dataset; after a restart.

    Where the tokenised dataset is gone it is made anew, and must come out the same.

    Raises:
        InvalidField: as `prepare`.
        CorruptData: the dataset is another one than the job began with.
    """
    digest = str(report["digest"])
    try:
        dataset = await asyncio.to_thread(TokenisedDataset, data_dir / "datasets" / digest)
    except NotFound:
        prepared = await prepare(spec, roots=roots, data_dir=data_dir)
        if prepared.report["digest"] != digest:
            raise CorruptData(
                f"dataset.path = {spec.dataset.path!r}: dataset or tokenizer have changed since the job began "
                f"(digest {prepared.report['digest']}, then {digest}). Put the old files back, or start a new job."
            ) from None
        return prepared
    return await asyncio.to_thread(_finish, spec, roots, dataset, *_model(spec, roots))


def _prepare(
    spec: JobSpec, roots: Sequence[Path], data_dir: Path, advance: Callable[[int], None], limits: Limits
) -> Prepared:
    directory, info, words = _model(spec, roots)
    source = open_source(spec.dataset, seed=spec.seed, roots=roots)
    digest = _digest(spec, source, words)
    parent = data_dir / "datasets"
    try:
        dataset = TokenisedDataset(parent / digest)
    except NotFound:
        with Writer(parent, digest) as writer:
            counts = Prompts(spec.dataset, words).write(source.rows(limits), writer, advance=advance)
            found = {"digest": digest, "tokenizer_digest": words.digest, "source": spec.dataset.path}
            dataset = TokenisedDataset(writer.finish({**found, **counts}))
    return _finish(spec, roots, dataset, directory, info, words)


def _model(spec: JobSpec, roots: Sequence[Path]) -> tuple[Path, ModelInfo, Tokenizer]:
    try:
        directory = confine("model", spec.model, roots)
    except InvalidField:
        if not hub.looks_like_model(spec.model):
            raise
        directory = hub.model_directory(spec.model)
    else:
        _links_stay_inside(directory, "model", roots)
    info = model_dir.check(directory)
    if spec.tokenizer is None:
        field, words = "model", tokenizer.load(directory, eos_ids=info.eos_ids, field="model")
    else:
        field, other = "tokenizer", confine("tokenizer", spec.tokenizer, roots)
        _links_stay_inside(other, field, roots)
        words = tokenizer.load(other, eos_ids=info.eos_ids, field=field)
    if words.vocab > info.vocab:
        raise InvalidField(
            field,
            str(directory),
            f"the tokenizer has {words.vocab} ids, the model only {info.vocab}",
            "Use the tokenizer that the model was trained with.",
        )
    if not words.eos_ids and not spec.sampling.stop:
        raise InvalidField(
            field,
            str(directory),
            "names no end-of-sequence token, so no response would ever end",
            "Set eos_token_id in generation_config.json, or sampling.stop.",
        )
    if (largest := max(words.eos_ids, default=0)) >= info.vocab:
        raise InvalidField(
            field,
            str(directory),
            f"end-of-sequence id {largest} is not below vocab_size {info.vocab}",
            "Correct eos_token_id in config.json and generation_config.json.",
        )
    return directory, info, words


def _finish(
    spec: JobSpec, roots: Sequence[Path], dataset: TokenisedDataset, directory: Path, info: ModelInfo, words: Tokenizer
) -> Prepared:
    longest = dataset.report["tokens"]["max"]
    room = info.context - longest
    if spec.sampling.max_completion_length > room:
        raise InvalidField(
            "sampling.max_completion_length",
            spec.sampling.max_completion_length,
            f"does not fit: the longest prompt has {longest} tokens, the model's context {info.context}",
            f"Use at most {room}, or leave long prompts out with a smaller dataset.max_prompt_length."
            if room > 0
            else f"Leave long prompts out: dataset.max_prompt_length below {info.context}.",
        )
    digest = reward_files.check(
        spec.rewards,
        roots=roots,
        has_truth=dataset.report["rows_with_ground_truth"] > 0,
        columns=dataset.report["columns"],
    )
    return Prepared(
        dataset=dataset,
        order=Order(len(dataset), seed=spec.seed, shuffle=spec.dataset.shuffle),
        tokenizer=words,
        model_dir=directory,
        tokenizer_dir=confine("tokenizer", spec.tokenizer, roots) if spec.tokenizer is not None else None,
        context=info.context,
        rewards_digest=digest,
        report=dataset.report,
    )


def _links_stay_inside(directory: Path, field: str, roots: Sequence[Path]) -> None:
    for name in strays(directory, roots):
        raise InvalidField(
            field,
            str(directory),
            f"{name} is a link that leads outside of the server's roots",
            "Copy the file, or add the directory that it leads to to RLHARVEST_ROOTS.",
        )


def _digest(spec: JobSpec, source: Source, words: Tokenizer) -> str:
    """Cover all that the tokenised dataset depends on."""
    data = spec.dataset
    settings = [data.format, data.prompt_key, data.label_key, data.system_prompt, data.apply_chat_template]
    depends: list[Any] = [_LAYOUT, source.fingerprint(), words.digest, words.encode_plain([""])[0], *settings]
    depends += [data.max_prompt_length, data.size]
    return blake3.blake3(json.dumps(depends).encode()).hexdigest()
