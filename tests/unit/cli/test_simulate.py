"""`rlharvest simulate`: a table, files, and errors that name the field."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rlharvest.cli import main, spec
from rlharvest.simulator import chart, reference, scenario

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "scenarios" / "qwen3-14b.yaml"
SMALL = ("--set", "steps=1", "--set", "workload.prompts_per_step=4", "--set", "workload.max_tokens=3000")


def run(*arguments: str) -> int:
    before = sys.argv
    sys.argv = ["rlharvest", *arguments]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def test_it_prints_a_table_and_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", str(EXAMPLE), "--out", str(tmp_path / "out"), *SMALL) == 0
    shown = capsys.readouterr().out
    for name in ("colocated", "reserved", "rlboost", "rlharvest"):
        assert name in shown
        assert json.loads((tmp_path / "out" / f"{name}.json").read_text())["finished"]
    assert (tmp_path / "out" / "progress.png").exists() == chart.AVAILABLE


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--set", "stepz=1"), "did you mean 'steps'"),
        (("--set", "market.trace=nowhere.csv"), "market.trace"),
        (("--set", "steps=0"), "steps = 0"),
    ],
)
def test_what_is_wrong_is_named(arguments: tuple[str, ...], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", str(EXAMPLE), *arguments) == 2
    assert names in capsys.readouterr().err


@pytest.mark.parametrize("name", ["qwen3-14b", "fleet"])
def test_the_example_scenarios_are_valid(name: str) -> None:
    path = ROOT / "examples" / "scenarios" / f"{name}.yaml"
    assert scenario.parse(spec.read(path, "scenario", holds="", top="")).name == name


def test_the_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "scenario.md").read_text() == reference.reference(), (
        "run: python -m rlharvest.simulator.reference > docs/scenario.md"
    )
