"""Reward functions in real child processes: every outcome is a number or a named fault, and nothing survives a kill."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rlharvest_reward import process as process_module
from rlharvest_reward.fault import RewardFault
from rlharvest_reward.pool import Pool
from rlharvest_reward.process import RewardProcess

from .conftest import SANDBOX, Start, gone, sample, spec_of, survivors, until

VERL = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kw):\n    "
TRL = "def compute_score(prompts, completions, completion_ids, **columns):\n    "


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (VERL + "return float(solution_str == ground_truth)", 1.0),
        (VERL + "return {'score': 0.5, 'acc': 1}", 0.5),
        (VERL + "return data_source == 'sums' and extra_info['index'] == 3", 1.0),
        (VERL + "return None", None),
        ("def compute_score(solution_str): return len(solution_str)", 1.0),
        ("async " + VERL + "return 0.25", 0.25),
        (TRL + "return [1.0 for c in completions]", 1.0),
        (TRL + "return [float(c == g) for c, g in zip(completions, columns['ground_truth'])]", 1.0),
        (TRL + "return [None]", None),
        (TRL + "return [columns['level'][0] + columns['trainer_state'].global_step]", 7.0),
        (TRL + "return [completion_ids[0][0]]", 7.0),
        ("import asyncio\nasync " + TRL + "await asyncio.sleep(0)\n    return [1]", 1.0),
        ("def compute_score(completions, level): return [level[0]]", 2.0),
        ("import numpy\n" + TRL + "return numpy.array([0.5], dtype='float32')", 0.5),
    ],
)
async def test_functions_of_both_styles_give_numbers(start: Start, source: str, expected: float | None) -> None:
    process = await start(source)
    assert await process.score(sample(), 10) == expected
    assert process.usable


@pytest.mark.parametrize(
    ("source", "kind", "says"),
    [
        (VERL + "return float('nan')", "not_finite", r"rewards\.py:compute_score returned nan; expected a finite"),
        (VERL + "return '0.5'", "wrong_type", r"returned '0\.5' \(str\); expected a finite number"),
        (VERL + "return {'reward': 1}", "wrong_type", r"keys \['reward'\]; expected the key 'score'"),
        (TRL + "return [1.0, 1.0]", "wrong_length", r"returned 2 values \[1\.0, 1\.0\]; expected 1"),
        (TRL + "return []", "wrong_length", "returned 0 values"),
        (TRL + "return 1.0", "wrong_type", "expected a list of 1"),
        (VERL + "return 1 / 0", "exception", r"ZeroDivisionError: division by zero\n  rewards\.py:2 in compute_score"),
        (VERL + "raise ValueError('x' * 100_000)", "exception", "characters more"),
        (VERL + "raise SystemExit(0)", "exception", "raised SystemExit: 0"),
        (VERL + "raise KeyboardInterrupt", "exception", "raised KeyboardInterrupt"),
        (VERL + "return solution_str['a']", "exception", "TypeError"),
        ("def compute_score(solution_str, missing): return 1.0", "exception", "missing 1 required .* 'missing'"),
    ],
)
async def test_every_other_outcome_is_a_fault_and_the_process_stays(
    start: Start, source: str, kind: str, says: str
) -> None:
    process = await start(source)
    for _ in range(2):
        with pytest.raises(RewardFault, match=says) as caught:
            await process.score(sample(), 10)
        assert caught.value.kind == kind
        assert len(str(caught.value)) <= 2_000
    assert process.usable


@pytest.mark.parametrize(
    ("source", "changes", "kind", "says"),
    [
        (
            "import no_such_module",
            {},
            "exception",
            r"importing rewards\.py raised ModuleNotFoundError: .*no_such_module",
        ),
        ("def broken(:", {}, "exception", r"importing rewards\.py raised SyntaxError: .*line 1: def broken"),
        ("raise RuntimeError('at import')", {}, "exception", "RuntimeError: at import"),
        ("import os; os._exit(7)", {}, "crashed", "ended with exit status 7 while loading"),
        ("def score(x): pass\ndef other(): pass", {}, "not_found", "no function 'compute_score'; found other, score"),
        ("compute_score = 3", {}, "not_found", "'compute_score' is not a function; found none"),
        ("def compute_score(a, b): pass", {}, "wrong_type", r"has the parameters \(a, b\); expected `completions`"),
        ("", {"path": "/nowhere/rewards.py"}, "not_found", "no file /nowhere/rewards.py"),
        ("x = bytearray(50 << 30)", {}, "memory", "importing rewards.py ran out of memory"),
        ("", {"path": None, "builtin": "regex", "params": {"pattern": "("}}, "wrong_type", "not a regular expression"),
    ],
)
async def test_what_cannot_be_loaded_says_why(
    start: Start, source: str, changes: dict[str, Any], kind: str, says: str
) -> None:
    with pytest.raises(RewardFault, match=says) as caught:
        await start(source, **changes)
    assert caught.value.kind == kind


async def test_an_import_without_end_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("while True: pass")
    with pytest.raises(RewardFault, match="was not done with loading after 1 s"):
        await RewardProcess.start(spec_of(path), sandbox=SANDBOX, load_timeout_s=1)


FORKS = """
import os, time, subprocess, sys
def compute_score(solution_str):
    {body}
"""


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        ("while True: pass", {"timeout"}),
        ("return 9**9**9 > 0", {"timeout", "memory"}),
        ("time.sleep(1e6)", {"timeout"}),
        ("return len(bytearray(50 << 30))", {"memory"}),
        ("x = []\n    while True: x.append(bytearray(16 << 20))", {"memory", "timeout"}),
        ("os._exit(0)", {"crashed"}),
        ("os.kill(os.getpid(), 11)", {"crashed"}),
        ("os.closerange(0, 100); time.sleep(1e6)", {"crashed"}),
        ("os.fork(); time.sleep(1e6)", {"timeout"}),
        ("subprocess.Popen(['sleep', '1000000']); time.sleep(1e6)", {"timeout"}),
        ("subprocess.Popen(['sleep', '1000000']); os._exit(3)", {"crashed"}),
        ("if os.fork() == 0: time.sleep(1e6)\n    os._exit(3)", {"crashed"}),
        ("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1e6)", {"timeout"}),
    ],
)
async def test_what_does_not_end_well_is_killed_with_all_it_started(start: Start, body: str, kinds: set[str]) -> None:
    process = await start(FORKS.format(body=body))
    began = time.monotonic()
    with pytest.raises(RewardFault) as caught:
        await process.score(sample(), 0.7)
    assert time.monotonic() - began < 5
    assert caught.value.kind in kinds
    assert not process.usable
    await process.close()
    assert survivors(process.pid) == []
    assert gone(process.pid)


async def test_a_fork_that_returns_does_not_answer_twice(start: Start) -> None:
    process = await start(FORKS.format(body="return float(os.fork() > 0)"))
    assert [await process.score(sample(), 5) for _ in range(3)] == [1.0, 1.0, 1.0]


async def test_prints_neither_block_nor_reach_the_protocol(start: Start) -> None:
    source = (
        "import os, sys\n" + VERL + "print('x' * 10_000_000)\n    os.write(1, b'raw')\n"
        "    print('last', file=sys.stderr)\n    return 1.0"
    )
    process = await start(source)
    for _ in range(2):
        assert await process.score(sample(), 20) == 1.0
    await until(lambda: process.output_total > 20_000_000)
    assert len(process.output) <= process_module.OUTPUT_BYTES


async def test_input_is_empty(start: Start) -> None:
    process = await start("import sys\n" + VERL + "return float(sys.stdin.read() == '')")
    assert await process.score(sample(), 5) == 1.0


async def test_the_environment_holds_nothing_of_the_service(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("RLHARVEST_NATS_URL", "nats://user:password@host")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = await start(
        f"import os\n{VERL}print(*os.environ, os.path.basename(os.getcwd()), *os.listdir('.'))\n    return 1.0"
    )
    await process.score(sample(), 5)
    await until(lambda: process.last_output() != "")
    *names, directory = process.last_output().split()
    assert set(names) <= {
        *process_module.PASSED_ON,
        *("HOME", "TMPDIR", "PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    } | {"LC_CTYPE"}
    assert directory in os.listdir(tempfile.gettempdir())
    await process.close()
    assert directory not in os.listdir(tempfile.gettempdir())


async def test_the_only_open_descriptors_are_its_own(start: Start) -> None:
    process = await start("import os\n" + VERL + "return float(len(os.listdir('/proc/self/fd')))")
    # Standard three, the connection, and the one that lists the directory.
    assert await process.score(sample(), 5) == 5.0


async def test_chat_prompts_give_chat_completions(start: Start) -> None:
    process = await start(
        TRL + "return [float(completions[0][0]['content'] == '4' and prompts[0][0]['role'] == 'user')]"
    )
    chat = sample(prompt=[{"role": "user", "content": "2 + 2?"}])
    assert await process.score(chat, 5) == 1.0


async def test_files_beside_the_reward_file_can_be_imported(start: Start, tmp_path: Path) -> None:
    neighbour = tmp_path / "rewards" / "neighbour_of_rewards.py"
    neighbour.parent.mkdir()
    neighbour.write_text("ONE = 1.0")
    process = await start("from neighbour_of_rewards import ONE\n" + VERL + "return ONE")
    assert await process.score(sample(), 5) == 1.0


async def test_numeric_gives_one_through_the_real_process(start: Start) -> None:
    process = await start("", path=None, builtin="numeric", memory_mb=1024)
    right = sample(completion=r"so \boxed{2\sqrt{2}}", columns={"ground_truth": r"\sqrt{8}"})
    assert await process.score(right, 20) == 1.0
    assert await process.score(sample(completion="#### 4"), 20) == 1.0
    assert await process.score(sample(completion="#### 5"), 20) == 0.0


async def test_a_pattern_that_backtracks_for_ever_is_killed(start: Start) -> None:
    process = await start("", path=None, builtin="regex", params={"pattern": "(a+)+$"})
    with pytest.raises(RewardFault, match="regex was not done with scoring"):
        await process.score(sample(completion="a" * 64 + "b"), 0.5)


@pytest.mark.slow
async def test_after_a_hundred_kills_the_pool_is_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(
        "import os\ndef compute_score(solution_str):\n    os._exit(1) if solution_str == 'die' else None\n    return 1"
    )

    async def begin(key: str) -> RewardProcess:
        return await RewardProcess.start(spec_of(path), sandbox=SANDBOX, load_timeout_s=30)

    pool = Pool(begin, size=2, idle_s=60)

    async def call(completion: str) -> float | None:
        async with pool.process("key") as process:
            return await process.score(sample(completion=completion), 10)

    results = await asyncio.gather(*(call("die") for _ in range(100)), return_exceptions=True)
    assert all(isinstance(result, RewardFault) and result.kind == "crashed" for result in results)
    assert (pool.busy, pool.idle, pool.started) == (0, 0, 100)
    assert await asyncio.gather(*(call("live") for _ in range(10))) == [1.0] * 10
    assert pool.idle <= 2
    await pool.close()
    me = psutil.Process()
    assert [each for each in me.children(recursive=True) if "rlharvest_reward.child" in " ".join(each.cmdline())] == []


async def test_a_child_dies_with_the_service(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def compute_score(solution_str):\n    while True: pass")
    service = (
        "import asyncio, sys\n"
        "from rlharvest_reward.process import RewardProcess\n"
        "from rlharvest_reward.sandbox import Sandbox\n"
        "async def main():\n"
        f"    process = await RewardProcess.start({spec_of(path)!r}, sandbox=Sandbox(()), load_timeout_s=30)\n"
        "    print(process.pid, flush=True)\n"
        f"    await process.score({sample()!r}, 1000)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", service, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert not gone(pid)
    parent.kill()
    await parent.wait()
    await until(lambda: gone(pid))


async def test_a_file_over_the_limit_fails_the_call(start: Start) -> None:
    """The system refuses the write, not the service's disk."""
    body = "open('large', 'wb').truncate(257 << 20)"
    process = await start(FORKS.format(body=body))
    with pytest.raises(RewardFault, match="File too large"):
        await process.score(sample(), 5.0)
    await process.close()
