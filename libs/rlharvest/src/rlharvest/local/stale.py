"""Processes that a killed launcher left behind, found again by pid, start time and command line.

The kernel ends direct children with their launcher (exec.py); what these had started themselves may live on in their
process group, and on other systems all of them may. A pid alone says nothing, since the kernel uses it again; records of an
earlier boot say nothing at all.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil


def record(pid: int, command: list[str]) -> dict[str, Any]:
    """Return what identifies a child that was just started; its pid is also its process group."""
    try:
        started = psutil.Process(pid).create_time()
    except psutil.Error:
        started = 0.0
    return {"pid": pid, "started": started, "command": command, "boot": boot()}


def boot() -> str:
    """Return what names this boot of the machine; empty where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def same(entry: Mapping[str, Any], started: float, cmdline: list[str]) -> bool:
    """Whether a live process is the recorded one: it started at the same instant with the same arguments."""
    command = entry["command"]
    return abs(started - float(entry["started"])) < 0.05 and cmdline[-len(command) + 1 :] == command[1:]


def end(records: Mapping[str, Any], *, patience_s: float = 5.0) -> list[str]:
    """End the recorded processes that still run, and their groups: SIGTERM, then SIGKILL. Return their names."""
    ended = []
    groups = []
    for name, entry in records.items():
        members = _group(entry) if entry["boot"] == boot() else []
        if members:
            ended.append(name)
            groups.append(members)
            _signal(members, signal.SIGTERM)
    limit = time.monotonic() + patience_s
    while groups and time.monotonic() < limit:
        groups = [alive for members in groups if (alive := [member for member in members if _alive(member)])]
        time.sleep(0.05)
    for members in groups:
        _signal(members, signal.SIGKILL)
    return ended


def _group(entry: Mapping[str, Any]) -> list[psutil.Process]:
    """Return the live members of a recorded process's group: none when the pid is somebody else's by now."""
    pid = entry["pid"]
    try:
        leader = psutil.Process(pid)
        if not same(entry, leader.create_time(), leader.cmdline()):
            return []
    except psutil.NoSuchProcess:
        pass  # its children may still be there: a pid is not used again while it names a group
    except psutil.AccessDenied:
        return []
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == pid and process.create_time() >= entry["started"] - 0.05:
                members.append(process)
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return [member for member in members if _alive(member)]


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _signal(members: list[psutil.Process], number: signal.Signals) -> None:
    for member in members:
        try:
            member.send_signal(number)
        except psutil.Error:
            continue
