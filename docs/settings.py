"""The reference of all settings: `python docs/settings.py > docs/settings.md`. A contract test holds the file to it."""

from __future__ import annotations

from rlharvest import fields
from rlharvest.settings import ServiceSettings
from rlharvest_coordinator.settings import CoordinatorSettings
from rlharvest_reward.settings import RewardSettings
from rlharvest_rollout.settings import RolloutSettings
from rlharvest_trainer.settings import TrainerSettings
from rlharvest_weights.settings import WeightSettings

HEAD = """\
# Settings

<!-- Made by `python docs/settings.py > docs/settings.md`; edit the settings.py of the service. -->

Every service reads its settings from environment variables. `rlharvest up` sets most of them and passes the rest of its own
environment on; the compose file lists what it sets. A value may come from a file instead: `RLHARVEST_API_TOKEN_FILE` names a
file whose content is taken for `RLHARVEST_API_TOKEN`, and so with every other variable. Else a secret comes from the file of
its name in `RLHARVEST_SECRETS_DIR`. Files of tokens are read again when they change.
"""

CLIENT = """
## Command line

| variable | meaning |
| --- | --- |
| `RLHARVEST_URL` | Server that commands speak to; the same as `--url`. |
| `RLHARVEST_TOKEN` | Bearer token that they send; the same as `--token`. |
| `RLHARVEST_TLS_CA` | PEM file of the authorities that they believe, for an https:// server. |
| `RLHARVEST_DATA_DIR` | Data directory of `rlharvest up`, `ps`, `scale` and `doctor`; the same as `--data`. |
| `RLHARVEST_WEIGHTS_URL` | Weight service that `rlharvest export` reads from where checkpoints are on another machine. |
| `OMP_NUM_THREADS` | Threads of each torch process of `rlharvest up`, unless `--threads` is given. |
| `NO_COLOR` | Set: no colours. |
"""

SERVICES: tuple[tuple[str, type[ServiceSettings], dict[str, str]], ...] = (
    ("Coordinator", CoordinatorSettings, {"roots": "the working directory"}),
    ("Rollout worker", RolloutSettings, {}),
    ("Trainer", TrainerSettings, {"trainer": "`trainer-<host name>`"}),
    ("Weight service", WeightSettings, {}),
    ("Reward service", RewardSettings, {"roots": "the working directory", "processes": "cores, at least 2"}),
)


def text() -> str:
    """Return the whole reference as Markdown."""
    shared = set(ServiceSettings.model_fields)
    parts = [HEAD, "\n## All services\n\n", _table(ServiceSettings, {}, leave_out=set())]
    for name, settings, computed in SERVICES:
        command = f"`rlharvest-{settings.__module__.partition('.')[0].removeprefix('rlharvest_')} serve`"
        parts += [f"\n## {name}\n\n{command}. {settings.__doc__}\n\n", _table(settings, computed, leave_out=shared)]
    return "".join([*parts, CLIENT])


def _table(settings: type[ServiceSettings], computed: dict[str, str], *, leave_out: set[str]) -> str:
    rows = [
        (
            f"`RLHARVEST_{field.name.upper()}`",
            f"{field.kind}, {field.bounds}" if field.bounds else field.kind,
            field.default,
            field.meaning,
        )
        for field in fields.of(settings, computed)
        if field.name not in leave_out
    ]
    return fields.table(("variable", "type and bounds", "default", "meaning"), rows)


if __name__ == "__main__":
    print(text(), end="")
