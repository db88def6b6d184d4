"""docs/metrics.md lists every metric and every counter that the code has a name for, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "libs" / "rlharvest" / "src" / "rlharvest" / "ledger"
COORDINATOR = ROOT / "services" / "coordinator" / "src" / "rlharvest_coordinator"
TRAINER = ROOT / "services" / "trainer" / "src" / "rlharvest_trainer"


def section(title: str) -> set[str]:
    """Names in the first column of the tables of a section."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    (body,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    return set(re.findall(r"^\| `([^`]+)` \|", body, re.MULTILINE))


def functions(path: Path, *names: str) -> Iterator[ast.AST]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (not names or node.name in names):
            yield node


def keys(tree: ast.AST, holder: str = "") -> Iterator[str]:
    """Constant keys: of dict literals, or of subscripts of what is called `holder`."""
    for node in ast.walk(tree):
        if not holder and isinstance(node, ast.Dict):
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
        elif holder and isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            name = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if name == holder and isinstance(node.slice.value, str):
                yield node.slice.value


@pytest.mark.parametrize("service", ["coordinator", "rollout", "trainer", "weights", "reward"])
def test_every_prometheus_metric_is_listed(service: str) -> None:
    source = (ROOT / "services" / service / "src" / f"rlharvest_{service}" / "metrics.py").read_text(encoding="utf-8")
    named = set(re.findall(r'"(rlharvest_[a-z_]+)"', source))
    # A counter is served with `_total`, whether its name in the code has it or not.
    listed = section("Prometheus")
    assert named, "no metric found: does the service still keep them in metrics.py?"
    assert {name for name in named if not {name, f"{name}_total"} & listed} == set()


def test_every_metric_lies_in_a_metrics_module() -> None:
    """So that the test above sees all of them."""
    makers = re.compile(r"prometheus_client(\.core)? import .*(Counter|Gauge|Histogram|Summary)")
    found = {path for path in ROOT.glob("*/*/src/**/*.py") if makers.search(path.read_text(encoding="utf-8"))}
    assert {path.name for path in found} == {"metrics.py"}


def test_every_curve_of_a_job_is_listed() -> None:
    (metrics,) = functions(TRAINER / "statistics.py", "metrics")
    (apply,) = functions(TRAINER / "step.py", "apply")
    (told,) = functions(TRAINER / "report.py", "step_metrics")
    named = {*keys(metrics), *keys(metrics, "values"), *keys(apply, "metrics")}
    named |= {f"perf/{key}" if re.fullmatch(r"[a-z_]+_s", key) else key for key in keys(told)}
    assert named == section("Curves of a job")


def test_every_counter_of_a_job_is_listed() -> None:
    named = {"reward_errors"}
    for path in [*LEDGER.glob("*.py"), *COORDINATOR.glob("*.py")]:
        for function in functions(path):
            named |= set(keys(function, "counters"))
    (leaving,) = functions(LEDGER / "book.py", "_change")
    named |= {
        argument.value
        for call in ast.walk(leaving)
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "_leave"
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }
    (totals,) = functions(COORDINATOR / "tally.py", "totals")
    named |= set(keys(totals))
    assert named == section("Counters of a job")
