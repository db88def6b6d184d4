"""Reward code that means harm: each thing that it must not do is tried by a real function in a real child process.

An attempt is refused with an error number of the kernel's; one that is let through gives 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rlharvest_reward import process as process_module
from rlharvest_reward import trial, usage
from rlharvest_reward.fault import RewardFault
from rlharvest_reward.limits import MAX_TASKS
from rlharvest_reward.sandbox import Sandbox

from .conftest import SANDBOX, Start, sample, survivors, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is made of parts of Linux")

REFUSED = (errno.EPERM, errno.EACCES)

HOSTILE = """
import ctypes, errno, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def system(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
def compute_score(solution_str):
    scope = {}
    exec("def attempt():\\n    " + solution_str, globals(), scope)
    try:
        return float(scope["attempt"]() or 0)
    except OSError as error:
        return error.errno
"""

Attempt = Callable[[str], Awaitable[float | None]]
"""Runs statements in reward code; gives what they return, else the number of their OSError, else 0."""


async def hostile(start: Start, sandbox: Sandbox = SANDBOX, memory_mb: int = 1024) -> Attempt:
    process = await start(HOSTILE, sandbox, memory_mb=memory_mb)
    assert process.walls == ["who", "tasks", "files", "calls"]

    async def attempt(body: str) -> float | None:
        return await process.score(sample(completion=body), 60)

    return attempt


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the service's user that has nothing to do with rewards."""
    sleeping = subprocess.Popen(["sleep", "1000"], env={"SECRET": "s3cret"})
    yield sleeping
    alive = sleeping.poll() is None
    sleeping.kill()
    sleeping.wait()
    assert alive, "the victim was killed"


# The network


async def test_no_socket_of_any_family_and_no_pair_that_can_send_to_an_address(start: Start) -> None:
    attempt = await hostile(start)
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET", "AF_VSOCK"):
        for kind in ("SOCK_STREAM", "SOCK_DGRAM", "SOCK_RAW"):
            assert await attempt(f"socket.socket(socket.{family}, socket.{kind})") in REFUSED, family
    for kind in ("SOCK_DGRAM", "SOCK_SEQPACKET"):
        assert await attempt(f"socket.socketpair(socket.AF_UNIX, socket.{kind})") in REFUSED, kind


async def test_nothing_listens_to_it(start: Start, tmp_path: Path) -> None:
    """A TCP port and a unix socket of this machine, tried with what sockets it can get, and from a program it starts."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "service"))
        unix.listen()
        port = tcp.getsockname()[1]
        connect = f"socket.create_connection(('127.0.0.1', {port}))"
        attempt = await hostile(start)
        assert await attempt(connect) in REFUSED
        assert await attempt(f"socket.socketpair()[0].connect({str(tmp_path / 'service')!r})") in REFUSED
        elsewhere = f"import socket; {connect}"
        body = f"return subprocess.run([sys.executable, '-c', {elsewhere!r}], stderr=-3).returncode"
        assert await attempt(body) == 1
        assert (await attempt("socket.getaddrinfo('example.com', 80)") or 0) < 0
        for server in (tcp, unix):
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.accept()


async def test_no_system_call_goes_around_the_filter(start: Start) -> None:
    """io_uring opens sockets by itself; clone3 hides its flags."""
    attempt = await hostile(start)
    for number, refused in ((425, errno.EPERM), (426, errno.EPERM), (435, errno.ENOSYS)):
        assert await attempt(f"system(libc.syscall({number}, 1, 0))") == refused


# Reading


SECRETS = (
    *("/proc/{service}/environ", "/proc/{service}/mem", "/proc/{service}/fd/0", "/proc/{service}/cmdline"),
    *("/proc/1/environ", "/proc/{victim}/environ", "/proc/net/tcp", "/etc/shadow", "/etc/hostname"),
    *("{outside}/secret", "{root}/link", "{root}/.env", "{root}/data/token", "{root}/../outside/secret"),
    *("/proc/self/root/etc/hostname", "/proc/self/cwd/../../etc/hostname", "/dev/mem", "/dev/kmsg", "/dev/shm/x"),
)


async def test_files_that_are_no_jobs_cannot_be_read(
    start: Start, tmp_path: Path, victim: subprocess.Popen[bytes]
) -> None:
    root, outside = furnished(tmp_path)
    other = await start("import os\ndef compute_score(solution_str):\n    print(os.getcwd(), flush=True)\n    return 1")
    await other.score(sample(), 20)
    await until(lambda: other.last_output() != "")
    attempt = await hostile(start, Sandbox(roots=(str(root),), hidden=(str(root / "data"),)))
    names = {
        "service": os.getpid(),
        "victim": victim.pid,
        "root": root,
        "outside": outside,
        "folder": other.last_output(),
    }
    for secret in SECRETS:
        found = await attempt(f"open({secret.format(**names)!r}, 'rb').read()")
        assert found in REFUSED or (found == errno.ENOENT and secret.startswith("/dev/")), secret
    assert await attempt(f"os.listdir({other.last_output()!r})") in REFUSED
    assert await attempt("os.listdir('/proc')") in REFUSED


def furnished(tmp_path: Path) -> tuple[Path, Path]:
    """Make a root with all kinds of entries, and a directory outside."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    for directory in (outside, root / "data", root / "sub" / ".kept"):
        directory.mkdir(parents=True)
    for file in (outside / "secret", root / ".env", root / "data" / "token", root / "cases.json"):
        file.write_text("7")
    (root / "sub" / "cases.json").write_text("7")
    (root / "link").symlink_to(outside / "secret")
    (root / "inner").symlink_to(root / "cases.json")
    return root, outside


async def test_files_of_the_roots_can_be_read(start: Start, tmp_path: Path) -> None:
    root, outside = furnished(tmp_path)
    attempt = await hostile(start, Sandbox(roots=(str(root),), hidden=(str(root / "data"),)))
    for name in ("cases.json", "sub/cases.json", "inner"):
        assert await attempt(f"return open({str(root / name)!r}).read()") == 7.0
    # Also when a link is turned around after every check that a service could make.
    (root / "inner").unlink()
    (root / "inner").symlink_to(outside / "secret")
    assert await attempt(f"return open({str(root / 'inner')!r}).read()") in REFUSED


async def test_the_environment_of_the_service_is_not_in_reach(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHARVEST_API_TOKEN", "s3cret")
    attempt = await hostile(start)
    assert await attempt("return 's3cret' in open('/proc/self/environ').read()") == 0
    assert await attempt("return any('s3cret' in value for value in os.environ.values())") == 0


# Writing


WRITES = (
    *("open({file!r}, 'w')", "open({file!r}, 'a')", "open({file!r}, 'r+b')", "os.truncate({file!r}, 0)"),
    *("os.remove({file!r})", "os.rename({file!r}, 'mine')", "os.link({file!r}, 'mine')", "os.chmod({file!r}, 0o777)"),
    *("os.utime({file!r})", "os.chown({file!r}, os.getuid(), os.getgid())", "os.setxattr({file!r}, 'user.x', b'')"),
    *("open({folder!r} + '/new', 'w')", "os.mkdir({folder!r} + '/new')", "os.symlink('x', {folder!r} + '/new')"),
    *("os.rmdir({folder!r} + '/empty')", "os.mkfifo({folder!r} + '/new')", "open('/dev/shm/x', 'w')"),
    *("open('/tmp/rlharvest-escaped', 'w')", "open({rewards!r}, 'a')", "open('/dev/full', 'w')"),
    *("os.rename('own', {folder!r} + '/new')", "os.link('own', {folder!r} + '/new')", "os.mknod('device', 0o60600, 0)"),
)


async def test_nothing_is_written_outside_of_its_folder(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "empty").mkdir(parents=True)
    folder.chmod(0o777)
    file = folder / "file"
    file.write_text("as it was")
    file.chmod(0o666)
    before = sorted(folder.iterdir())
    names = {"file": str(file), "folder": str(folder), "rewards": str(tmp_path / "rewards" / "rewards.py")}
    attempt = await hostile(start, Sandbox(roots=(str(tmp_path),)))
    assert await attempt("open('own', 'w')") == 0
    for body in WRITES:
        assert await attempt(body.format(**names)) in (*REFUSED, errno.EXDEV), body
    assert file.read_text() == "as it was"
    assert sorted(folder.iterdir()) == before
    assert file.stat().st_mode & 0o777 == 0o666


async def test_its_folder_is_its_own_to_write_in_and_goes_with_it(start: Start) -> None:
    body = (
        "import tempfile, shutil; d = tempfile.mkdtemp(); open(d + '/a', 'w').write('x'); os.rename(d + '/a', d + '/b'); "
        "os.symlink('b', d + '/c'); os.truncate(d + '/c', 0); os.makedirs(d + '/e/f'); os.remove(d + '/b'); "
        "print(os.getcwd(), flush=True)"
    )
    process = await start(HOSTILE)
    assert await process.score(sample(completion=body), 20) == 0
    await until(lambda: process.last_output() != "")
    name = Path(process.last_output()).name
    assert name in os.listdir(tempfile.gettempdir())
    await process.close()
    assert name not in os.listdir(tempfile.gettempdir())


# Other processes, and rights


HARM = (
    *("os.kill({victim}, signal.SIGKILL)", "os.kill({victim}, 0)", "os.kill(1, 0)", "os.kill({service}, 0)"),
    *("os.kill(-1, signal.SIGKILL)", "os.kill(0, signal.SIGKILL)", "os.killpg({victim}, signal.SIGKILL)"),
    *("signal.pidfd_send_signal(os.pidfd_open({victim}), signal.SIGKILL)", "os.setsid()", "os.setpgid(0, 0)"),
    *("system(libc.ptrace(16, {victim}, 0, 0))", "system(libc.ptrace(0, 0, 0, 0))", "os.setresuid(0, 0, 0)"),
    *("system(libc.process_vm_readv({victim}, 0, 0, 0, 0, 0))", "os.kill({other}, 0)", "open('/proc/{other}/mem')"),
    *("resource.prlimit({victim}, resource.RLIMIT_CPU, (0, 0))", "os.sched_setaffinity({victim}, [0])"),
    *("system(libc.prlimit(0, 6, ctypes.byref((ctypes.c_ulong * 2)(1, 1)), 0))", "os.setpriority(0, {victim}, 19)"),
    *("system(libc.unshare(0x10000000))", "system(libc.mount(b'/', b'/', b'', 4096, 0))", "os.chroot('.')"),
    *("system(libc.memfd_create(b'x', 0))", "system(libc.shmget(0, 1 << 30, 0o1600))"),
    "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, {victim})",
)


async def test_other_processes_are_not_in_reach(start: Start, victim: subprocess.Popen[bytes]) -> None:
    """Nor are rights that would bring them there, or memory that nobody counts."""
    other = await start("def compute_score(solution_str): return 1")
    attempt = await hostile(start)
    names = {"victim": victim.pid, "service": os.getpid(), "other": other.pid}
    for body in HARM:
        assert await attempt(body.format(**names)) in REFUSED, body
        assert victim.poll() is None, body
    assert await attempt("return os.geteuid() == 0 or os.getegid() == 0") == 0


# Too much of something

BOMB = """
import os, threading, time
def compute_score(solution_str):
    while True:
        try:
            {body}
        except (OSError, RuntimeError):
            pass
"""


def tasks_below(leader: int) -> int:
    """Return how many processes and threads there are from `leader` down."""
    count = 0
    for pid in usage.tree(leader):
        with contextlib.suppress(OSError):
            count += len(os.listdir(f"/proc/{pid}/task"))
    return count


@pytest.mark.parametrize(
    "body",
    [
        "os.fork()",
        "os.fork(); os.fork(); time.sleep(0.001)",
        "threading.stack_size(65536); threading.Thread(target=time.sleep, args=(1e6,)).start()",
        "os.posix_spawn('/bin/sh', ['sh', '-c', ':(){ :|:& }; :'], {})",
    ],
)
async def test_a_fork_bomb_is_bounded_and_ended(start: Start, body: str) -> None:
    process = await start(BOMB.format(body=body))
    scoring = asyncio.create_task(process.score(sample(), 2.0))
    most = 0
    while not scoring.done():
        await asyncio.sleep(0.05)
        most = max(most, await asyncio.to_thread(tasks_below, process.pid))
    with pytest.raises(RewardFault) as caught:
        await scoring
    assert caught.value.kind in ("timeout", "memory", "crashed")
    assert 1 < most <= 2 * MAX_TASKS
    await process.close()
    assert survivors(process.pid) == []


async def test_memory_counts_over_all_processes(start: Start) -> None:
    body = """
import os, time
def compute_score(solution_str):
    for _ in range(8):
        if os.fork() == 0:
            held = bytearray(os.urandom(1)) * (100 << 20)
            time.sleep(1e6)
    time.sleep(1e6)
"""
    process = await start(body, memory_mb=300)
    with pytest.raises(RewardFault, match=r"processes used more than 300 MiB\. Raise memory_mb") as caught:
        await process.score(sample(), 60)
    assert caught.value.kind == "memory"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("n += 1; open(f'{n}', 'wb').write(bytes(8 << 20))", "wrote more than 32 MiB into its folder"),
        ("f = open('x', 'wb'); os.remove('x'); f.write(bytes(8 << 20)); kept.append(f)", "wrote more than 32 MiB"),
        ("n += 1; open(f'{n}', 'wb')", "made more than 500 files in its folder"),
        ("os.mkdir('d'); os.chdir('d')", "made more than 500 files in its folder"),
    ],
)
async def test_a_folder_that_fills_up_is_the_functions_end(
    start: Start, monkeypatch: pytest.MonkeyPatch, body: str, says: str
) -> None:
    monkeypatch.setattr(usage, "MAX_SCRATCH_BYTES", 32 << 20)
    monkeypatch.setattr(usage, "MAX_SCRATCH_FILES", 500)
    source = f"import os, time\ndef compute_score(solution_str):\n    n, kept = 0, []\n    while True: {body}"
    process = await start(source)
    with pytest.raises(RewardFault, match=says):
        await process.score(sample(), 60)
    await process.close()


async def test_a_file_has_a_largest_size(start: Start) -> None:
    attempt = await hostile(start)
    assert await attempt("f = open('x', 'wb'); f.truncate(10 << 30)") == errno.EFBIG


async def test_prints_without_end_leave_the_service_its_time(start: Start) -> None:
    process = await start("def compute_score(solution_str):\n    while True: print('x' * 100_000)")
    scoring = asyncio.create_task(process.score(sample(), 1.0))
    turns = 0
    while not scoring.done():
        await asyncio.sleep(0)
        turns += 1
    with pytest.raises(RewardFault, match="was not done with scoring"):
        await scoring
    assert turns > 100
    assert len(process.output) <= process_module.OUTPUT_BYTES


async def test_what_a_function_leaves_running_stands_still_until_the_next_call(start: Start) -> None:
    source = """
import os, subprocess, threading
def spin():
    while True: pass
def compute_score(solution_str):
    if not hasattr(threading, "spinning"):
        threading.spinning = threading.Thread(target=spin, daemon=True)
        threading.spinning.start()
        threading.other = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    return 1
"""
    process = await start(source)
    for _ in range(2):
        assert await process.score(sample(), 20) == 1.0
        await until(lambda: states(usage.tree(process.pid)) == [psutil.STATUS_STOPPED] * 2)


def states(pids: list[int]) -> list[str]:
    return [psutil.Process(pid).status() for pid in pids]


# The answer

FORGE = """
import json, os, struct, sys
def sockets():
    for number in range(3, 64):
        try:
            if "socket" in os.readlink(f"/proc/self/fd/{number}"):
                yield number
        except FileNotFoundError:
            pass
channel = next(sockets())
def send(data):
    os.write(channel, struct.pack(">I", len(data)) + data)
def call():
    frame = sys._getframe()
    while not isinstance(frame.f_locals.get("frame"), dict):
        frame = frame.f_back
    return frame.f_locals["frame"]["call"]
def compute_score(solution_str):
    exec(solution_str)
    return 0.0
"""


@pytest.mark.parametrize(
    "body",
    [
        "send(json.dumps({'call': '0' * 16, 'value': 1.0}).encode())",
        "send(json.dumps({'call': call(), 'value': float('nan')}).encode())",
        "send(b'[' * 60_000)",
        "os.write(channel, b'\\xff' * 4096)",
        "import rlharvest_reward.frames as f; f.encode = lambda m: (4).to_bytes(4, 'big') + b'null'",
    ],
)
async def test_an_answer_that_is_none_is_a_crash_never_a_number(start: Start, body: str) -> None:
    """tests/unit/reward/test_replies.py has more of them."""
    process = await start(FORGE)
    with pytest.raises(RewardFault, match="broke the protocol") as caught:
        await process.score(sample(completion=body), 20)
    assert caught.value.kind == "crashed"
    assert not process.usable


async def test_an_answer_in_advance_is_not_taken_for_the_next_response(start: Start) -> None:
    """The function answers its call itself and once more besides: its own word stands, the surplus never passes."""
    process = await start(FORGE)
    surplus = sample(completion="send(json.dumps({'call': call(), 'value': 0.5}).encode())")
    assert await process.score(surplus, 20) == 0.5
    with pytest.raises(RewardFault, match="answered what it was not asked"):
        await process.score(sample(completion="pass"), 20)
    assert not process.usable


async def test_a_huge_string_is_a_short_fault(start: Start) -> None:
    process = await start("def compute_score(solution_str): return 'x' * (20 << 20)", memory_mb=1024)
    with pytest.raises(RewardFault, match=r"returned 'xx.*expected a finite number") as caught:
        await process.score(sample(), 60)
    assert caught.value.kind == "wrong_type"
    assert len(str(caught.value)) < 2_001


# What goes on working

WORK = (
    "import concurrent.futures as c; return sum(c.ThreadPoolExecutor(4).map(float, range(4)))",
    "import multiprocessing as m; a, b = m.Pipe(); p = m.Process(target=b.send, args=(6.0,)); p.start(); p.join(); "
    "return a.recv()",
    "return float(subprocess.run([sys.executable, '-c', 'print(6)'], capture_output=True, timeout=60).stdout)",
    "p = subprocess.Popen(['sleep', '100']); p.terminate(); return float(p.wait() == -signal.SIGTERM) * 6",
    "import asyncio; return asyncio.run(asyncio.to_thread(float, 6))",
    "import numpy; return float(numpy.linalg.solve(numpy.eye(3) / 2, numpy.ones(3)).sum())",
    "import sympy; return float(sympy.integrate(sympy.Symbol('x'), (sympy.Symbol('x'), 0, sympy.sqrt(12))))",
    "import sqlite3; return sqlite3.connect('x.db').execute('select 6.0').fetchone()[0]",
    "signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause(); return 6",
)


async def test_what_rewards_do_goes_on_working(start: Start) -> None:
    attempt = await hostile(start, memory_mb=2048)
    for body in WORK:
        assert await attempt(body) == 6.0, body


@pytest.mark.parametrize("allowed", [True, False])
async def test_locks_of_multiprocessing_need_shared_memory(start: Start, allowed: bool) -> None:
    attempt = await hostile(start, Sandbox(roots=(), shared_memory=allowed))
    body = "import concurrent.futures as c; return sum(c.ProcessPoolExecutor(2).map(float, range(4)))"
    assert await attempt(body) in ((6.0,) if allowed else REFUSED)


async def test_a_refusal_says_why(start: Start) -> None:
    process = await start("import socket\ndef compute_score(solution_str): socket.socket()")
    with pytest.raises(RewardFault, match=r"PermissionError.*Reward code has no network.*docs/operations\.md"):
        await process.score(sample(), 20)


async def test_the_verifier_of_reasoning_gym_works(start: Start) -> None:
    process = await start("", path=None, builtin="reasoning_gym", memory_mb=2048)
    columns = {"task": "chain_sum", "entry": {"question": "1 + 1", "answer": "2", "metadata": {}}}
    assert await process.score(sample(completion="<answer>2</answer>", columns=columns), 60) == 1.0


# Whether it holds here


async def test_this_machine_keeps_every_promise() -> None:
    assert await trial.broken(SANDBOX) == []


WITHOUT = """
import asyncio, errno, json
from rlharvest_reward import seccomp, trial
from rlharvest_reward.sandbox import Sandbox
seccomp.restrict([{missing}])
print(json.dumps(asyncio.run(trial.broken(Sandbox((), required={required})))))
"""


NO_LANDLOCK = '("landlock_create_ruleset", errno.ENOSYS, ())'
NO_SECCOMP = '("seccomp", errno.ENOSYS, ()), ("prctl", errno.EINVAL, (seccomp.Argument(0, 4, 22),))'


@pytest.mark.parametrize(
    ("missing", "found"), [(NO_LANDLOCK, {"reading", "writing"}), (NO_SECCOMP, {"network", "processes"})]
)
async def test_a_kernel_without_a_part_is_found_out(missing: str, found: set[str]) -> None:
    """The service refuses to start there, or says what does not hold if it was told to do without."""
    outputs = []
    for required in (True, False):
        tried = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", WITHOUT.format(missing=missing, required=required)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        outputs.append((await tried.communicate())[0].decode())
    refused, told = outputs
    assert "InvalidField: RLHARVEST_REWARD_SANDBOX = 'required'" in refused
    assert set(json.loads(told)) >= found
