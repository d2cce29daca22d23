"""The run directory, private to one user and one gateway. It holds the pid file and the embedded Redis' socket."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from shared.core.errors import StartError


class RunDir:
    """A directory locked by `open_run_dir` until `close`, which removes it if it was made for this run."""

    def __init__(self, path: Path, lock_fd: int, *, temporary: bool) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._temporary = temporary

    def close(self) -> None:
        (self.path / "gateway.pid").unlink(missing_ok=True)
        os.close(self._lock_fd)
        if self._temporary:
            shutil.rmtree(self.path, ignore_errors=True)


def open_run_dir(configured: str | None) -> RunDir:
    """Lock the configured directory, or make a temporary one. Raises `StartError`."""
    try:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        parent = runtime if runtime and os.access(runtime, os.W_OK) else None
        path = Path(configured or tempfile.mkdtemp(prefix="gateway-", dir=parent))
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid != os.geteuid():
            raise StartError(f"--run-dir: {path} belongs to another user; choose a directory of your own")
        path.chmod(0o700)
        return RunDir(path, _lock(path / "gateway.pid"), temporary=configured is None)
    except OSError as error:
        raise StartError(f"--run-dir: {configured or error.filename} cannot be used: {error.strerror}") from None


def _lock(pid_file: Path) -> int:
    # The lock dies with its holder, so the pid file of a killed gateway needs no clean-up. Children never inherit it.
    lock_fd = os.open(pid_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock_fd)
        raise StartError(f"--run-dir: {pid_file.parent} is in use by another gateway; give each its own") from None
    os.ftruncate(lock_fd, 0)
    os.write(lock_fd, f"{os.getpid()}\n".encode())
    return lock_fd
