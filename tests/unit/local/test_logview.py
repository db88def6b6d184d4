"""Log lines of all programs as one readable stream."""

from __future__ import annotations

import io
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rlharvest.local.logview import Line, LogView, parse, tail

JSON = json.dumps(
    {
        "event": "worker.joined",
        "level": "warning",
        "timestamp": "2026-01-02T03:04:05.678Z",
        "service": "coordinator",
        "worker": "wkr_1",
        "rate": 0.123456789,
        "note": "two words",
        "empty": "",
        "exception": "Traceback:\n  boom",
    }
)


def test_a_structured_line_becomes_event_and_fields_with_its_traceback_below() -> None:
    line = parse(JSON)
    assert line.text == 'worker.joined worker=wkr_1 rate=0.123457 note="two words" empty=""'
    assert line.level == "warning"
    assert line.time.endswith(":04:05")
    assert line.more == ("Traceback:", "  boom")


def test_lines_of_nats_and_valkey_lose_their_own_heads() -> None:
    assert parse("[12] 2026/11/30 12:00:00.123456 [WRN] slow consumer") == Line("slow consumer", "warning")
    assert parse("7:M 30 Nov 2026 12:00:00.123 * Ready to accept connections") == Line("Ready to accept connections")
    assert parse("7:M 30 Nov 2026 12:00:00.123 # Out of memory") == Line("Out of memory", "warning")


@given(st.text())
def test_any_other_line_is_shown_as_it_is(raw: str) -> None:
    line = parse(raw)
    assert line.text == raw or raw.startswith(("{", "[")) or raw[:1].isdigit()


def test_names_are_in_front_and_quiet_programs_show_only_warnings() -> None:
    output = io.StringIO()
    view = LogView(output, width=8)
    view.show("nats", "[1] 2026/11/30 12:00:00.1 [INF] hello", quiet=True)
    view.show("nats", "[1] 2026/11/30 12:00:00.1 [ERR] bad", quiet=True)
    view.show("reward", "plain")
    view.say("up")
    lines = [line.partition(" ")[2] for line in output.getvalue().splitlines()]
    assert lines == ["nats     │ bad", "reward   │ plain", "rlharvest │ up"]


def test_colour_goes_by_role_so_that_all_workers_look_alike() -> None:
    output = io.StringIO()
    view = LogView(output, colour=True, width=4)
    view.show("rollout-1", "a")
    view.show("trainer-1", "b")
    view.show("rollout-2", "c")
    first, second, third = (line.split("\x1b[")[3][:2] for line in output.getvalue().splitlines())
    assert first == third != second


def test_the_level_hides_what_is_below_it() -> None:
    output = io.StringIO()
    LogView(output, level="warning").show("x", '{"event": "chat", "level": "info"}')
    assert output.getvalue() == ""


def test_tail_renders_the_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("\n".join(["first", *(f"line {number}" for number in range(30)), JSON]) + "\n")
    shown = tail(log, lines=4)
    assert shown[-1] == "      boom"
    assert len(shown) == 4
    assert tail(tmp_path / "none.log") == []
