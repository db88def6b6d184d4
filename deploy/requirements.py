"""Print the dependencies of the distributions in the given directories, less our own, so that an image can install them in
a layer that changes only with a pyproject.toml.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def dependencies(directories: list[str]) -> list[str]:
    """Return the sorted requirements of the distributions."""
    found: set[str] = set()
    for directory in directories:
        project = tomllib.loads(Path(directory, "pyproject.toml").read_text(encoding="utf-8"))["project"]
        found.update(line for line in project["dependencies"] if not line.startswith("rlharvest"))
    return sorted(found)


if __name__ == "__main__":
    print("\n".join(dependencies(sys.argv[1:])))
