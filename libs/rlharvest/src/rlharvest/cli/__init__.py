"""The `rlharvest` command.

Exit codes: 0 all went well; 1 the job, or the program that was run, failed; 2 what was given is wrong; 3 nobody answers
at the server's address.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the `rlharvest` command."""
    from rlharvest.cli.app import main as run  # who wants the exit codes alone imports no more

    run()
