"""`rlharvest plan`: a table for people, JSON for programs, one line for what cannot be planned."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rlharvest.cli import main

ROOT = Path(__file__).parents[3]
INVENTORY = str(ROOT / "examples" / "inventories" / "h800-h20.yaml")
CONFIG = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "intermediate_size": 8192,
    "vocab_size": 32_000,
}


def run(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["rlharvest", "plan", *arguments])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "job.yaml"
    path.write_text("model: ./model\ndataset: {path: x.jsonl}\nrewards: [{builtin: exact_match}]\n")
    return path


def test_the_plan_is_a_table_that_says_what_binds_and_what_comes_second(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(INVENTORY, str(job), "--response-tokens", "300", monkeypatch=monkeypatch) == 0
    shown = capsys.readouterr().out
    for part in (
        "train",
        "rollout",
        "h800",
        "h20",
        "DP ",
        "TP ",
        "step",
        "an hour",
        "waits for",
        "Second best",
        "compared",
    ):
        assert part in shown, part


def test_json_has_every_figure(job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(INVENTORY, str(job), "--json", "--full", "--blocking", monkeypatch=monkeypatch) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["best"]["step_s"] > 0
    assert result["best"]["usd_per_million_tokens"] > 0
    assert result["second"]["step_s"] >= result["best"]["step_s"]
    assert result["exact"] is True
    assert result["assumed"]["parameters"] > 1e9


def test_what_cannot_be_planned_is_one_line_and_exit_code_2(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.yaml").write_text("machines: 3\n")
    assert run(str(tmp_path / "bad.yaml"), str(job), monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err.startswith("error: machines = 3")
    assert run(str(tmp_path / "none.yaml"), str(job), monkeypatch=monkeypatch) == 2
    assert "inventory file" in capsys.readouterr().err
    assert run(INVENTORY, str(job), "--set", "model=org/elsewhere", monkeypatch=monkeypatch) == 2
    assert "--config" in capsys.readouterr().err
    assert run(INVENTORY, str(job), "--config", INVENTORY, monkeypatch=monkeypatch) == 2
    assert "config.hidden_size" in capsys.readouterr().err


def test_without_scipy_it_says_what_to_install(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("rlharvest.planner", "scipy"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert run(INVENTORY, str(job), monkeypatch=monkeypatch) == 2
    assert "rlharvest[planner]" in capsys.readouterr().err
