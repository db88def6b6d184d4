"""Entry point of `rlharvest-coordinator`: signals first, because the imports take seconds."""

from __future__ import annotations

from rlharvest.startup import leave_on_signals


def main() -> None:
    """Run the command line; SIGTERM ends it with 0 from the first instant."""
    leave_on_signals()
    from rlharvest_coordinator import cli

    cli.run()


if __name__ == "__main__":
    main()
