"""Small models with random weights, and an engine that is driven to the end of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from rlharvest.engine import Engine, EngineConfig, Request, Sampling
from rlharvest.spans import Finish, Span, Tokens
from rlharvest_rollout.engines.torch.engine import TorchEngine

VOCAB = 300
CONTEXT = 256
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


class MakeModel(Protocol):
    def __call__(self, kind: str = "llama", *, seed: int = 0, tied: bool = False, **config: Any) -> Path: ...


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Return a directory with a model of a kind; its logits are peaked enough for the choice of tokens to matter."""
    made: dict[str, Path] = {}

    def make(kind: str = "llama", *, seed: int = 0, tied: bool = False, **config: Any) -> Path:
        key = repr((kind, seed, tied, sorted(config.items())))
        if key not in made:
            config_class, model_class = CLASSES[kind]
            shape = {
                "vocab_size": VOCAB,
                "hidden_size": 64,
                "intermediate_size": 171,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "tie_word_embeddings": tied,
                "max_position_embeddings": 512,
                "initializer_range": 0.2,
            }
            torch.manual_seed(seed)
            model = model_class(config_class(**{**shape, **config}))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):  # initialised to zero, which would hide a bias that is left out
                        parameter.normal_(0, 0.2)
            made[key] = tmp_path_factory.mktemp("model")
            model.save_pretrained(made[key])
            save_tokenizer(made[key])
        return made[key]

    return make


def save_tokenizer(directory: Path) -> None:
    """Save a tokenizer of letters: id 5 is 'f', and so on round the alphabet; id 0 is special."""
    vocab = {"<eos>": 0} | {
        chr(97 + index % 26) + (str(index // 26) if index >= 26 else ""): index for index in range(1, VOCAB)
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<eos>"))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))


def request(handle: int = 0, **changes: Any) -> Request:
    """Return a request with a prompt of its group's own."""
    group = changes.pop("group", handle)
    prompt = np.random.default_rng(group).integers(1, VOCAB, 5 + group % 17).astype(np.uint32)
    values: dict[str, Any] = {
        "handle": handle,
        "attempt": 1,
        "group": group,
        "seed": 1000 + handle,
        "prompt": prompt,
        "prefix": np.array([], dtype=np.uint32),
        "budget": 40,
        "sampling": Sampling(),
    }
    values.update(changes)
    values["prefix"] = np.asarray(values["prefix"], dtype=np.uint32)
    return Request(**values)


@dataclass
class Driver:
    """An engine and what came out of it."""

    engine: Engine
    got: dict[int, Tokens]
    finishes: dict[int, Finish]
    patience_s: float = 20
    """Longest wait for new tokens."""

    def submit(self, requests: Iterable[Request]) -> None:
        """Submit, and expect the tokens after each prefix."""
        requests = list(requests)
        for one in requests:
            prefix = [int(token) for token in one.prefix]
            self.got[one.handle] = Tokens(ids=prefix, logprobs=[0.0] * len(prefix))
            self.finishes.pop(one.handle, None)
        self.engine.submit(requests)

    async def take(self) -> list[Span]:
        """Wait for spans once, and append them."""
        async with asyncio.timeout(self.patience_s):
            spans = await self.engine.spans()
        for span in spans:
            tokens = self.got[span.handle]
            tokens.extend(span)
            assert sum(run.n for run in span.runs) == len(span.ids) == len(span.logprobs)
            if span.finish is not Finish.NONE:
                assert span.handle not in self.finishes
                self.finishes[span.handle] = span.finish
        return spans

    async def until(self, condition: Callable[[], bool]) -> None:
        """Take spans until a condition holds."""
        while not condition():
            await self.take()

    async def finish(self, handles: Iterable[int]) -> None:
        """Take spans until these responses ended."""
        wanted = set(handles)
        await self.until(lambda: wanted <= set(self.finishes))


class Drive(Protocol):
    def __call__(self, directory: Path, *, slots: int = 64, **config: Any) -> AbstractAsyncContextManager[Driver]: ...


@pytest.fixture
def drive() -> Drive:
    """Start an engine on a model; close it after the test."""

    @asynccontextmanager
    async def started(
        directory: Path,
        *,
        slots: int = 64,
        kv_memory_bytes: int = 1 << 28,
        draft_memory_bytes: int = 1 << 26,
        **config: Any,
    ) -> AsyncIterator[Driver]:
        engine = TorchEngine(
            threads=1,
            slots=slots,
            kv_memory_bytes=kv_memory_bytes,
            draft_memory_bytes=draft_memory_bytes,
            device="cpu",
        )
        values: dict[str, Any] = {"slots": slots, "context": CONTEXT, "options": {}, "batch_invariant": True}
        try:
            await engine.start(EngineConfig(**{**values, **config}))
            await engine.load(directory, 1)
            yield Driver(engine, {}, {})
        finally:
            await engine.close()

    return started


@pytest.fixture(scope="session")
def driver_of() -> Callable[..., Driver]:
    """Return a driver of any engine that is ready."""
    return lambda engine, patience_s=20.0: Driver(engine, {}, {}, patience_s)


MakeRequest = Callable[..., Request]


@pytest.fixture
def make_request() -> MakeRequest:
    """See `request`."""
    return request
