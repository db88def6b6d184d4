"""`rlharvest-coordinator serve` runs a coordinator; `migrate` brings the database to the newest schema; `backup` and
`restore` keep and bring back what must not be lost.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlharvest import process

from rlharvest_coordinator.settings import CoordinatorSettings


def run() -> None:
    """Do what the command line says, and end the process."""
    arguments = _parser().parse_args()
    settings = process.read_settings(CoordinatorSettings)
    # Each command imports what it needs itself: what serves takes seconds.
    match arguments.command:
        case "serve":
            from rlharvest_coordinator.service import serve

            process.run("coordinator", settings, lambda: serve(settings))
        case "migrate":
            from rlharvest_coordinator.migrations import migrate

            process.run("coordinator", settings, lambda: migrate(settings.database))
        case _:
            from rlharvest_coordinator.backup import command

            sys.exit(command.run(arguments, settings))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlharvest-coordinator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("serve", help="run until SIGTERM")
    commands.add_parser("migrate", help="bring the database to the newest schema")
    backup = commands.add_parser("backup", help="write SQL, checkpoints and numbers of versions into one tar file")
    backup.add_argument("file", help="tar file to make; - is standard output")
    restore = commands.add_parser("restore", help="bring a backup back into an empty system that does not run")
    restore.add_argument("file", help="tar file of `backup`; - is standard input")
    for command in (backup, restore):
        command.add_argument(
            "--weights",
            type=Path,
            required=True,
            help="the weight service's directory (its RLHARVEST_DATA_DIR/weights)",
        )
    return parser
