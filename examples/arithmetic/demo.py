"""The whole system on this machine, from nothing to a better model, with a worker killed on the way.

Makes the model (cached), starts `rlharvest up`, submits job.yaml, kills a worker with SIGKILL in the middle of its
generation (the launcher starts another one in its place), and shows what it was good for. Exits with 1 unless the gain on
the held-out problems is more than two standard errors and no token was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from evaluate import paired_gain, right
from rich.console import Console
from rich.table import Table
from rlharvest.client import Client

HERE = Path(__file__).resolve().parent
console = Console(highlight=False)
MOST_KILLS = 4


def main() -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(description="Train the arithmetic example and kill a worker on the way.")
    parser.add_argument("--out", type=Path, default=Path(".rlharvest/demo"), help="where model, data and results go")
    parser.add_argument("--workers", type=int, default=2, help="rollout workers")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()

    say("1. A small model, warm-started by a careless teacher (cached).")
    make = subprocess.run([sys.executable, HERE / "model.py", "--out", out / "start"], check=False)
    if make.returncode:
        return make.returncode
    rows = [json.loads(line) for line in (out / "start" / "heldout.jsonl").read_text().splitlines() if line]
    before = right(out / "start" / "model", rows)
    say(f"   Held-out accuracy {sum(before) / len(before):.1%} of {len(rows)} problems.")

    say(f"2. rlharvest up: NATS, Valkey, coordinator, weights, reward, trainer, {arguments.workers} rollout workers.")
    with (
        tempfile.TemporaryDirectory(prefix="rlharvest-demo-") as data,
        system(Path(data), out, arguments.workers) as client,
    ):
        say("3. The job: GRPO on two-digit additions.")
        spec = job(out)
        name = client.create_job(spec)["id"]
        killed = follow(client, name, spec["limits"]["max_steps"])
        found = client.get_job(name)
        if found["status"] != "succeeded":
            console.print(f"[red]The job {found['status']}: {found['error']}[/red]")
            return 1
        curves = client.metrics(name)
        versions = len(client.weights(name))
        trained = out / "trained"
        shutil.rmtree(trained, ignore_errors=True)
        subprocess.run(
            [Path(sys.executable).parent / "rlharvest", "export", name, trained],
            check=True,
            env={**os.environ, "RLHARVEST_URL": client.url, "RLHARVEST_TOKEN": client.token or ""},
            stdout=subprocess.DEVNULL,
        )
    after = right(trained, rows)
    gain = paired_gain(before, after)
    picture = plot(curves, out / "reward.png", killed)
    reward = [value for value in curves["series"]["reward"] if value is not None]
    counters = found["counters"]

    table = Table(title="What it was good for", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("mean reward, first and last step", f"{reward[0]:.3f} → {reward[-1]:.3f}")
    table.add_row(
        "held-out accuracy, greedy",
        f"{sum(before) / len(before):.1%} → {sum(after) / len(after):.1%}  "
        f"(gain {gain.mean:.1%} ± {gain.standard_error:.1%}, {gain.standard_errors:.1f} standard errors)",
    )
    table.add_row("optimizer steps", str(found["progress"]["step"]))
    table.add_row("versions published", f"{found['progress']['weight_version'] + 1} ({versions} kept)")
    table.add_row("tokens generated", f"{counters['generated_tokens']:,}")
    table.add_row("workers killed with SIGKILL", f"{len(killed)}; another one took each place")
    table.add_row("responses that went on elsewhere", str(counters.get("reassigned", 0)))
    table.add_row("tokens salvaged from the dead worker", str(counters.get("salvaged_tokens", 0)))
    table.add_row("tokens regenerated (made, not yet sent)", str(counters.get("regenerated_tokens", 0)))
    table.add_row("tokens that came too late (fenced)", str(counters.get("fenced_tokens", 0)))
    table.add_row(
        "responses submitted = trained + dropped",
        f"{counters['submitted']} = {counters['trained']} + {counters['dropped']}",
    )
    table.add_row("seconds, set-up of the model included", f"{time.monotonic() - started:.0f}")
    table.add_row("trained model", str(trained))
    table.add_row("reward curve", str(picture))
    console.print(table)

    good = gain.standard_errors > 2 and counters["submitted"] == counters["trained"] + counters["dropped"]
    say("It learned, and nothing was lost." if good else "It did NOT gain more than two standard errors.")
    return 0 if good else 1


def job(out: Path) -> dict[str, Any]:
    """Return job.yaml with the paths of this run."""
    spec: dict[str, Any] = yaml.safe_load((HERE / "job.yaml").read_text())
    spec["model"] = str(out / "start" / "model")
    spec["dataset"]["path"] = str(out / "start" / "train.jsonl")
    spec["rewards"][0]["path"] = str(HERE / "rewards.py")
    return spec


@contextmanager
def system(data: Path, out: Path, workers: int) -> Iterator[Client]:
    """Run `rlharvest up` for as long as the context lasts."""
    log, address = out / "up.log", data / "up.json"
    # A port of its own choice: it tells which in up.json.
    command = [Path(sys.executable).parent / "rlharvest", "up", "--data", data, "--port", "0"]
    command += ["--rollout", str(workers), "--slots", "8", "--root", out, "--root", HERE]
    with log.open("w") as output:
        # Responses are short here: publish oftener, so that a dying worker has published a part of them.
        token = secrets.token_urlsafe(24)
        environment = {**os.environ, "RLHARVEST_FLUSH_S": "0.02", "RLHARVEST_API_TOKEN": token}
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment)
    client = None
    try:
        end = time.monotonic() + 120
        while client is None:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"rlharvest up did not come up:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
            if address.exists():
                client = Client(json.loads(address.read_text())["url"], token)
        say(f"   Web page {client.url}/login#{token}   Log {log}")
        yield client
    finally:
        if client is not None:
            client.close()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def follow(client: Client, name: str, steps: int) -> list[int]:
    """Show progress until the job ends; kill a worker on the way. Return the steps at which one died.

    A response of this job has four tokens, so a worker may die just before the first of them was published: then there was
    nothing to salvage, and a few steps later another one dies.
    """
    killed: list[int] = []
    shown = 0
    while True:
        found = client.get_job(name)
        step = found["progress"]["step"]
        if step > shown:
            shown = step
            reward = client.metrics(name, names=["reward"], from_step=step)["series"]["reward"][-1]
            bar = "█" * round(30 * reward)
            console.print(f"   step {step:>3}/{steps}  reward {reward:.3f} {bar}")
        due = step >= (killed[-1] + 8 if killed else min(3, steps // 4)) and len(killed) < MOST_KILLS
        if due and not found["counters"].get("salvaged_tokens", 0):
            victim = generating(client, name)
            if victim is not None:
                os.kill(victim["pid"], signal.SIGKILL)
                killed.append(step)
                console.print(
                    f"   [bold]SIGKILL for worker {victim['id']} (process {victim['pid']}) while it generates.[/bold]"
                )
        if found["status"] in ("succeeded", "failed", "cancelled"):
            return killed
        time.sleep(0.02 if due else 0.2)


def generating(client: Client, name: str) -> dict[str, Any] | None:
    """Return a worker that is in the middle of its responses, as soon as the first tokens of one are published."""
    workers = [worker for worker in client.workers() if worker["state"] == "ready"]
    if workers and any(live["state"] == "streaming" for live in client.live_samples(name)):
        return dict(workers[0])
    return None


def plot(curves: dict[str, Any], path: Path, killed: list[int]) -> Path:
    """Draw the reward by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), dpi=120)
    steps, rewards = curves["steps"], curves["series"]["reward"]
    points = [(step, reward) for step, reward in zip(steps, rewards, strict=True) if reward is not None]
    axes.plot([step for step, _ in points], [reward for _, reward in points], marker="o", markersize=3)
    for index, step in enumerate(killed):
        axes.axvline(step + 1, color="tab:red", linestyle="--", label="a worker is killed" if index == 0 else None)
    if killed:
        axes.legend()
    axes.set(xlabel="optimizer step", ylabel="mean reward", title="GRPO on two-digit additions")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path


def say(text: str) -> None:
    """Print a line of the story."""
    console.print(text)


if __name__ == "__main__":
    sys.exit(main())
