"""A launcher of small fake services, run as a program by the tests: `fake_up.py DATA KIND`.

KIND: `good`; `broken`: the service ends at once; `deaf`: the service ignores SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from rlharvest.errors import RlharvestError
from rlharvest.local import ports, stale
from rlharvest.local.datadir import DataDirectory
from rlharvest.local.launcher import Launcher, Plan
from rlharvest.local.logview import LogView
from rlharvest.local.program import Http, Program
from rlharvest.local.restarts import Policy

SERVICE = """
import http.server, json, os, signal, subprocess, sys, time
name, port, kind, stops = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
print(json.dumps({"event": "hello", "level": "info", "who": name}), file=sys.stderr, flush=True)
if kind == "broken":
    print("cannot open the thing", flush=True)
    sys.exit(3)
grandchild = subprocess.Popen(["sleep", "600"])
def leave(number, frame):
    if kind == "deaf":
        return
    with open(stops, "a") as file:
        file.write(name + "\\n")
    grandchild.kill()
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Ready).serve_forever()
"""


def program(data: Path, name: str, kind: str) -> Program:
    role = name.partition("-")[0]
    port = ports.choose([name], given={name: 0}, remembered={}, first=18000 + sum(name.encode()) % 500)[name]
    return Program(
        name=name,
        role=role,
        command=(sys.executable, "-c", SERVICE, name, str(port), kind, str(data / "stops")),
        probe=Http(f"http://127.0.0.1:{port}/readyz"),
        ready_s=60,
        grace_s=0.5 if kind == "deaf" else 30,
        may_leave=role == "rollout",
    )


async def main(data: DataDirectory, kind: str) -> None:
    migrate = Program(name="migrate", role="once", command=(sys.executable, "-c", "print('migrated')"))
    plan = Plan(
        stages=((program(data.path, "nats", "good"),), (migrate,), (program(data.path, "coordinator", kind),)),
        worker=lambda number: program(data.path, f"rollout-{number}", "good"),
        workers=2,
        stop_order=("rollout", "coordinator", "nats"),
        url="http://127.0.0.1:1",
        restarts=Policy(most=3, first_s=0.05, longest_s=0.1),
    )
    launcher = Launcher(data, plan, LogView(sys.stdout))
    await launcher.run(on_ready=lambda seconds: print(json.dumps({"ready": seconds}), flush=True))


if __name__ == "__main__":
    directory = DataDirectory(Path(sys.argv[1]))
    directory.create()
    try:
        directory.acquire()
        stale.end(directory.read("pids.json"))
        asyncio.run(main(directory, sys.argv[2]))
    except RlharvestError as error:
        print(f"error: {error}", flush=True)
        sys.exit(1)
