"""Make the model and the data of the arithmetic example: a tiny Llama that adds, but mostly forgets to carry.

The task: `12+07=` is to be answered by the sum with its digits reversed, `910`. Reversed, each digit depends only on what
stands before it, which is how a small network can learn to add. The supervised warm start is done by a careless teacher,
who first adds without ever carrying, and then forgets it more often than not. So the model has seen how to carry and
seldom does: its reward has room to rise, and reinforcement learning has something to find.

    python examples/arithmetic/model.py --out .rlharvest/arithmetic

writes DIR/model (an ordinary Hugging Face directory: config, tokenizer, safetensors), DIR/train.jsonl and
DIR/heldout.jsonl, which share no problem. Everything follows from the settings below: it is made once, under a name that
is a digest of them, in --cache, and copied from there afterwards.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+="
PAD, EOS = "<pad>", "<eos>"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that the outcome depends on."""

    layout: int = 1
    """Rises when this script would make something else from equal settings."""
    seed: int = 7
    largest: int = 99
    """Of a summand."""
    heldout: int = 256
    """Problems that are never trained on."""
    forgets: float = 0.75
    """How often the teacher forgets to carry in the last part of the warm start."""
    hidden_size: int = 192
    intermediate_size: int = 384
    layers: int = 3
    heads: int = 6
    context: int = 16
    initial_std: float = 0.07
    """Of the weights, about 1 / sqrt(hidden_size): the customary 0.02 keeps so narrow a network waiting for long."""
    plain_steps: int = 150
    """Of the warm start, without any carry."""
    mixed_steps: int = 75
    """Of the warm start, with some."""
    batch: int = 64
    learning_rate: float = 2e-3

    def digest(self) -> str:
        """Return a name for what these settings make."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def problems(settings: Settings) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return (train, heldout): all sums of two numbers, shuffled by the seed, as rows {question, answer}."""
    numbers = range(settings.largest + 1)
    rows = [{"question": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"[::-1]} for a in numbers for b in numbers]
    random.Random(settings.seed).shuffle(rows)
    return rows[settings.heldout :], rows[: settings.heldout]


def careless(question: str) -> str:
    """Return the answer of somebody who forgets every carry: each place is added for itself."""
    first, second = question.rstrip("=").split("+")
    digits = [str((int(a) + int(b)) % 10) for a, b in zip(first, second, strict=True)]
    return "".join(reversed(digits)) + "0"


def make_tokenizer() -> Any:
    """Return the tokenizer: one id a character."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: number for number, text in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def make_model(settings: Settings, tokenizer: Any) -> Any:
    """Return the untrained model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(settings.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads,
            max_position_embeddings=settings.context,
            initializer_range=settings.initial_std,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
        )
    )


def warm_start(model: Any, tokenizer: Any, rows: list[dict[str, str]], settings: Settings) -> None:
    """Train `model` for a short while on what the careless teacher writes; the loss is on the answers alone."""
    import torch

    eos = tokenizer.eos_token_id
    inputs = torch.tensor([[*tokenizer.encode(row["question"] + row["answer"]), eos] for row in rows])
    wrong = torch.tensor([[*tokenizer.encode(row["question"] + careless(row["question"])), eos] for row in rows])
    start = len(tokenizer.encode(rows[0]["question"]))
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    model.train()
    steps = settings.plain_steps + settings.mixed_steps
    for step in range(steps):
        chance = 1.0 if step < settings.plain_steps else settings.forgets
        chosen = torch.randint(len(inputs), (settings.batch,), generator=generator)
        forgets = torch.rand(settings.batch, 1, generator=generator) < chance
        batch = torch.where(forgets, wrong[chosen], inputs[chosen])
        labels = batch.clone()
        labels[:, :start] = -100
        loss = model(input_ids=batch, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0 or step + 1 == steps:
            say(f"warm start {step + 1:4d}/{steps}  loss {loss.item():.3f}")
    model.eval()


def make(directory: Path, settings: Settings) -> None:
    """Write model and data into `directory`, which must not exist."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    train, heldout = problems(settings)
    tokenizer = make_tokenizer()
    model = make_model(settings, tokenizer)
    say(f"a Llama with {sum(weight.numel() for weight in model.parameters()):,} weights, {len(train)} problems")
    warm_start(model, tokenizer, train, settings)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    for name, rows in (("train", train), ("heldout", heldout)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def cached(cache: Path, settings: Settings) -> Path:
    """Return the directory with what these settings make, making it if it is not in the cache yet."""
    home = cache / f"arithmetic-{settings.digest()}"
    if home.is_dir():
        say(f"found in the cache: {home}")
        return home
    cache.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=cache) as partial:
        make(Path(partial) / "made", settings)
        try:
            (Path(partial) / "made").rename(home)
        except OSError:
            if not home.is_dir():  # another process may have been faster
                raise
    say(f"made in {time.monotonic() - started:.0f} s")
    return home


def say(text: str) -> None:
    """Tell whoever waits how far it is."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description="Make the model and the data of the arithmetic example.")
    parser.add_argument(
        "--out", type=Path, required=True, help="directory to write model, train.jsonl and heldout.jsonl to"
    )
    parser.add_argument(
        "--cache", type=Path, default=Path(".rlharvest/cache"), help="where it is kept for the next time"
    )
    options = parser.parse_args(arguments)
    home = cached(options.cache, Settings())
    shutil.copytree(home, options.out, dirs_exist_ok=True)
    print(options.out / "model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
