"""`rlharvest up`: lock the data directory, end what a killed launcher left, choose ports, run the plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rlharvest import programs
from rlharvest.errors import InvalidField, NotFound
from rlharvest.keyring import Keyring, given_secrets
from rlharvest.local import plan as plans
from rlharvest.local import ports, stale
from rlharvest.local.datadir import DataDirectory
from rlharvest.local.launcher import Launcher, Plan
from rlharvest.local.logview import LogView
from rlharvest.local.plan import Options

SERVICES = ("coordinator", "weights", "reward", "trainer", "rollout")


async def up(
    options: Options,
    view: LogView,
    *,
    given_ports: Mapping[str, int],
    on_ready: Callable[[Plan, str, float], None],
) -> None:
    """Run everything until a signal; return when no child is left.

    Args:
        given_ports: ports the user chose, by name (see `ports.DEFAULTS`); 0: any free one.
        on_ready: called once with the plan, the API's token and the seconds that the start took.

    Raises:
        Conflict: another launcher runs on the data directory.
        InvalidField: an option cannot be used; names it, its value and the fix.
        NotFound: a program is not installed.
        ProgramFailed: a program did not start, or ended too often.
    """
    scripts = _check(options)
    nats, valkey = programs.nats_server(), programs.valkey_server()
    data = DataDirectory(options.data)
    data.create()
    data.acquire()
    try:
        ended = stale.end(data.read("pids.json"))
        if ended:
            view.say(f"ended what the last launcher left: {', '.join(ended)}", level="warning")
        remembered = {name: port for name, port in data.read("ports.json").items() if isinstance(port, int)}
        chosen = ports.choose(plans.port_names(options), given=given_ports, remembered=remembered)
        for name, port in chosen.items():
            if name in remembered and remembered[name] != port and name not in given_ports:
                view.say(f"{name} moved from port {remembered[name]}, which is in use, to {port}", level="warning")
        data.write("ports.json", {**remembered, **chosen})
        keyring = Keyring(data.secrets)
        keyring.make(given_secrets(os.environ))
        for directory in ("nats", "valkey", "checkpoints"):
            (data.path / directory).mkdir(exist_ok=True)
        (data.path / "nats" / "nats.conf").write_text(
            programs.nats_config(
                host=plans.HOST,
                port=chosen["nats"],
                monitor_port=chosen["nats-monitor"],
                store=data.path / "nats" / "jetstream",
                accounts=(keyring.holder("nats") / "accounts.conf").read_text(encoding="utf-8"),
            ),
            encoding="utf-8",
        )
        taken = dict(chosen)

        def worker_port(number: int) -> int:
            name = f"rollout-{number}-health"
            if name not in taken:
                taken.update(ports.choose([name], given={}, remembered=taken))
            return taken[name]

        plan = plans.make(options, chosen, nats=nats, valkey=valkey, scripts=scripts, worker_port=worker_port)
        await Launcher(data, plan, view).run(
            on_ready=lambda seconds: on_ready(plan, keyring.token("api_token"), seconds)
        )
    finally:
        data.release()


def _check(options: Options) -> Path:
    """Return the directory of the console scripts."""
    scripts = Path(sys.executable).parent
    missing = [name for name in SERVICES if not (scripts / f"rlharvest-{name}").exists()]
    if missing:
        raise NotFound(
            f"these services are not installed in {sys.prefix}: {', '.join(missing)}. "
            "Run: pip install 'rlharvest[local]'"
        )
    for root in options.roots:
        if not root.is_dir():
            raise InvalidField(
                "--root", str(root), "is not a directory", "Name one that holds models, data and rewards."
            )
    return scripts


def default_data() -> Path:
    """Return the data directory that commands use when none is named."""
    return Path(os.environ.get("RLHARVEST_DATA_DIR") or ".rlharvest")
