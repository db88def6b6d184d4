"""Held-out accuracy of one model, or of two on the same problems: is the second better, and is that more than luck?

    python examples/arithmetic/evaluate.py --data DIR/heldout.jsonl BEFORE [AFTER]

Answers are greedy and must match exactly. With two directories the difference is taken problem by problem, so its
standard error is that of paired differences.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Gain:
    """The mean of paired differences."""

    mean: float
    standard_error: float

    @property
    def standard_errors(self) -> float:
        """How many standard errors the gain is; infinite where every pair differs alike."""
        if self.standard_error == 0:
            return math.copysign(math.inf, self.mean) if self.mean else 0.0
        return self.mean / self.standard_error


def paired_gain(before: Sequence[bool], after: Sequence[bool]) -> Gain:
    """Return the gain in accuracy from `before` to `after`, right or wrong by problem, at least two problems."""
    differences = [int(new) - int(old) for old, new in zip(before, after, strict=True)]
    n = len(differences)
    mean = sum(differences) / n
    variance = sum((difference - mean) ** 2 for difference in differences) / (n - 1)
    return Gain(mean, math.sqrt(variance / n))


def answers(directory: Path, questions: Sequence[str], *, most: int = 8) -> list[str]:
    """Return the greedy answer of a model to each question."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()

    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for start in range(0, len(questions), 64):
        batch = tokenizer(list(questions[start : start + 64]), return_tensors="pt", padding=True)
        with torch.inference_mode():
            made = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=most,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        found += tokenizer.batch_decode(made[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def right(directory: Path, rows: Sequence[dict[str, str]]) -> list[bool]:
    """Return for each row {question, answer} whether the model's greedy answer is right."""
    made = answers(directory, [row["question"] for row in rows])
    return [answer.strip() == row["answer"] for answer, row in zip(made, rows, strict=True)]


def main(arguments: list[str] | None = None) -> int:
    """Run as a program; with two models the exit status is 0 only if the gain exceeds two standard errors."""
    parser = argparse.ArgumentParser(description="Held-out accuracy of one or two models.")
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help="a Hugging Face directory; at most two")
    parser.add_argument("--data", type=Path, required=True, help="heldout.jsonl")
    options = parser.parse_args(arguments)
    if len(options.models) > 2:
        parser.error("give one model or two")
    rows = [json.loads(line) for line in options.data.open(encoding="utf-8") if line.strip()]
    results = [right(model, rows) for model in options.models]
    for model, result in zip(options.models, results, strict=True):
        print(f"{model}: {sum(result)}/{len(result)} right ({sum(result) / len(result):.3f})")
    if len(results) < 2:
        return 0
    gain = paired_gain(*results)
    print(f"gain {gain.mean:+.3f} ± {gain.standard_error:.3f} ({gain.standard_errors:.1f} standard errors)")
    return 0 if gain.standard_errors > 2 else 1


if __name__ == "__main__":
    sys.exit(main())
