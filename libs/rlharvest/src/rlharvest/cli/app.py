"""The command line as a whole."""

from __future__ import annotations

import importlib.metadata
import sys

import typer

from rlharvest.cli import exits, jobs, local, plan, simulate
from rlharvest.errors import RlharvestError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Post-train language models with RL on reserved trainers plus any number of preemptible workers.",
)
app.add_typer(local.app)
app.add_typer(jobs.app)
app.add_typer(plan.app)
app.add_typer(simulate.app)


@app.command()
def version() -> None:
    """Print the version."""
    print(f"rlharvest {importlib.metadata.version('rlharvest')}")


def main() -> None:
    """Entry point of the `rlharvest` command."""
    try:
        app()
    except RlharvestError as error:
        sys.exit(exits.complain(error))
    except BrokenPipeError:
        # The reader of the pipe left; nothing more can be said to it, nor at exit.
        sys.stdout = None
        sys.exit(exits.OK)
