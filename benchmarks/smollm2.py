"""SmolLM2-135M-Instruct for benchmarks: made by examples/smollm2/model.py the first time that one asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "examples" / "smollm2" / "model.py"
DEFAULT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlharvest" / "smollm2-135m-instruct"


def smollm2(directory: Path = DEFAULT) -> Path:
    """Return a Hugging Face directory with the model.

    Raises:
        subprocess.CalledProcessError: it is not there and could not be made.
    """
    if not (directory / "model.safetensors").is_file():
        subprocess.run([sys.executable, os.fspath(PROGRAM), "--out", os.fspath(directory)], check=True)
    return directory
