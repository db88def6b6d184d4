"""The commands `rlharvest-coordinator backup` and `restore`: a file or a pipe, progress on standard error."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from rlharvest import logs
from rlharvest.cli import exits
from rlharvest.errors import DiskFull, InvalidField, NotFound, RlharvestError

from rlharvest_coordinator.backup import make
from rlharvest_coordinator.backup.make import Places
from rlharvest_coordinator.settings import CoordinatorSettings

PIPE = "-"


def run(arguments: argparse.Namespace, settings: CoordinatorSettings) -> int:
    """Run the command that the command line (rlharvest_coordinator.cli) names; return the exit status."""
    logs.configure("coordinator", level=settings.log_level, style=settings.log_format)
    places = Places(
        sql_url=settings.database,
        checkpoints=(settings.checkpoints_dir or settings.data_dir / "checkpoints").absolute(),
        weights=arguments.weights.absolute(),
    )
    try:
        if arguments.command == "backup":
            _backup(arguments.file, places)
        else:
            _restore(arguments.file, places)
    except RlharvestError as error:
        return exits.complain(error)
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    return exits.OK


def _backup(name: str, places: Places) -> None:
    if name == PIPE:
        asyncio.run(make.backup(places, sys.stdout.buffer, scratch=None, now=time.time(), say=_say))
        sys.stdout.buffer.flush()
        return
    file = Path(name)
    if file.exists():
        raise InvalidField("FILE", name, "exists already", "Name a file that does not exist yet.")
    if not file.absolute().parent.is_dir():
        raise InvalidField("FILE", name, "its directory does not exist", f"Run: mkdir -p {file.parent}")
    draft = file.with_name(f".{file.name}.writing-{os.getpid()}")
    try:
        with draft.open("xb") as output:
            asyncio.run(make.backup(places, output, scratch=file.absolute().parent, now=time.time(), say=_say))
            output.flush()
            os.fsync(output.fileno())
        draft.rename(file)
    except OSError as error:
        raise DiskFull(f"{file} cannot be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)
    _say(f"{file}, {file.stat().st_size / 1e6:.1f} MB")


def _restore(name: str, places: Places) -> None:
    if name == PIPE:
        asyncio.run(make.restore(sys.stdin.buffer, places, now=time.time(), say=_say))
        return
    try:
        source = Path(name).open("rb")  # noqa: SIM115 - closed below; only its opening may be the user's fault
    except OSError as error:
        raise NotFound(f"{name} cannot be read: {error.strerror}") from error
    with source:
        asyncio.run(make.restore(source, places, now=time.time(), say=_say))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
