"""Entry point of `rlharvest-trainer`: signals first, because the imports take seconds."""

from __future__ import annotations

from rlharvest.startup import leave_on_signals


def main() -> None:
    """Run the command line; SIGTERM ends it with 0 from the first instant."""
    leave_on_signals()
    from rlharvest_trainer.cli import app

    app(prog_name="rlharvest-trainer")


if __name__ == "__main__":
    main()
