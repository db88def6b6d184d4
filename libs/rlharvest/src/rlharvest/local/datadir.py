"""The data directory of a launcher: one owner at a time, and the small files by which the next one finds its way.

    DATA/lock        held (flock) by the running launcher; holds its pid
    DATA/ports.json  the ports that were chosen, so that a later launcher uses them again
    DATA/pids.json   the children that run, so that a later launcher ends what a killed one left
    DATA/up.json     where the running launcher's API is; absent when none is up
    DATA/control     unix socket for `rlharvest scale` and `rlharvest ps`
    DATA/logs/       one log a child
    DATA/secrets/    tokens, passwords and keys of the programs, see keyring.py

Invariants: the lock is the kernel's, so it ends with its holder, however that dies; files are replaced whole.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

from rlharvest.errors import Conflict, InvalidField


class DataDirectory:
    """One data directory."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: int | None = None

    @property
    def logs(self) -> Path:
        """Directory of the logs."""
        return self.path / "logs"

    @property
    def secrets(self) -> Path:
        """Directory of the secrets."""
        return self.path / "secrets"

    @property
    def control(self) -> Path:
        """Path of the control socket."""
        return self.path / "control"

    def create(self) -> None:
        """Make the directory.

        Raises:
            InvalidField: it cannot be made or written.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidField(
                "--data",
                str(self.path),
                f"cannot be written ({error.strerror})",
                "Choose another directory with --data.",
            ) from error

    def acquire(self) -> None:
        """Become its owner until the process ends.

        Raises:
            Conflict: another launcher runs on it; names the pid.
        """
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 32, 0).decode().strip()
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise Conflict(
                f"rlharvest is already up on {self.path} (pid {holder or 'unknown'}). Stop it with Ctrl-C or "
                f"`kill {holder or 'PID'}`, or give this one a directory of its own: rlharvest up --data DIR --port 0"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._lock = descriptor

    def release(self) -> None:
        """Give it up."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def read(self, name: str) -> dict[str, Any]:
        """Return what a JSON file of the directory holds; nothing when it is absent or was cut off."""
        try:
            values = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
            return {}
        return values if isinstance(values, dict) else {}

    def write(self, name: str, values: dict[str, Any]) -> None:
        """Replace a JSON file of the directory."""
        temporary = self.path / f".{name}.new"
        temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.path / name)

    def remove(self, name: str) -> None:
        """Remove a file of the directory if it is there."""
        (self.path / name).unlink(missing_ok=True)
