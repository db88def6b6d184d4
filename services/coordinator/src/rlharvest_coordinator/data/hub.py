"""Datasets and models of a Hugging Face hub, where one is reachable.

Datasets are read from the branch on which the hub keeps every dataset as Parquet (`refs/convert/parquet`, files
`<configuration>/<split>/<n>.parquet`), so that no code of a dataset is ever run. The client reads HF_ENDPOINT,
HF_TOKEN, HF_HUB_OFFLINE and HF_HOME from the environment.
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from rlharvest.errors import InvalidField

PREFIX = "hf://"
_BRANCH = "refs/convert/parquet"
_MODEL = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*")
_MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_FAULTS = (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError)


def looks_like_model(name: str) -> bool:
    """Return whether `name` could be a model of a hub: `owner/name`."""
    return _MODEL.fullmatch(name) is not None


def dataset_files(name: str, *, configuration: str | None, split: str) -> list[Path]:
    """Fetch the Parquet files of one split and return them in order.

    Raises:
        InvalidField: no hub answers, there is no such dataset, configuration or split; says which there are.
    """
    path = PREFIX + name
    try:
        files = HfApi().list_repo_files(name, repo_type="dataset", revision=_BRANCH)
    except (*_FAULTS, ValueError) as error:
        raise _unreachable("dataset.path", path, error) from error
    splits: dict[str, dict[str, list[str]]] = {}
    for file in sorted(files):
        if file.endswith(".parquet") and file.count("/") == 2:
            folder, part, _ = file.split("/")
            splits.setdefault(folder, {}).setdefault(part, []).append(file)
    if configuration is None and len(splits) > 1:
        raise InvalidField(
            "dataset.name", None, f"{path} has several configurations", f"Set one of {', '.join(splits)}."
        )
    chosen = configuration or next(iter(splits), "")
    if chosen not in splits:
        known = ", ".join(splits) or "none"
        raise InvalidField("dataset.name", configuration, f"{path} has no such configuration", f"It has: {known}.")
    if split not in splits[chosen]:
        raise InvalidField("dataset.split", split, f"{path} has no such split", f"It has: {', '.join(splits[chosen])}.")
    try:
        return [
            Path(hf_hub_download(name, file, repo_type="dataset", revision=_BRANCH)) for file in splits[chosen][split]
        ]
    except _FAULTS as error:
        raise _unreachable("dataset.path", path, error) from error


def model_directory(name: str) -> Path:
    """Fetch a model and return its directory in the hub's cache.

    Raises:
        InvalidField: no hub answers, or there is no such model.
    """
    try:
        return Path(snapshot_download(name, allow_patterns=_MODEL_FILES))
    except (*_FAULTS, ValueError) as error:
        raise _unreachable("model", name, error) from error


def _unreachable(field: str, value: str, error: Exception) -> InvalidField:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    local = (
        "Use a directory under the server's roots"
        if field == "model"
        else "Use a .jsonl, .jsonl.gz, .json or .parquet file, a directory of them, or reasoning-gym:<task>"
    )
    return InvalidField(
        field,
        value,
        f"there is no such path under the server's roots, and no hub gave it ({lines[0]})"
        if field == "model"
        else f"no hub gave it ({lines[0]})",
        f"{local}, or set HF_ENDPOINT and HF_TOKEN for a hub that has it.",
    )
