"""Real processes for the time of a test module: started, awaited by their ready line, and never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Final

from tests import started
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import IO

_START_S: Final = 90.0
_STOP_S: Final = 30.0
_SHOWN_CHARS: Final = 12_000


class Process:
    """`command` in a process group of its own, with both streams in files under `directory`.

    The second of a name has files of its own: the log of one that was killed is still told when a test fails.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        directory: Path,
        env: dict[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self.name = name
        number = sum(1 for _ in directory.glob(f"{name}*.out"))
        stem = f"{name}-{number + 1}" if number else name
        self._out = directory / f"{stem}.out"
        self._err = directory / f"{stem}.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self._popen = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env=env,
            )
        started.remember(self)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def stdin(self) -> IO[bytes]:
        """Where it was started with `stdin=PIPE`."""
        assert self._popen.stdin is not None
        return self._popen.stdin

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    @property
    def output(self) -> str:
        return self._out.read_text()

    @property
    def errors(self) -> str:
        return self._err.read_text()

    @property
    def log(self) -> str:
        """The end of what it wrote to either stream."""
        return (self.output + self.errors)[-_SHOWN_CHARS:]

    def ready_line(self) -> str:
        """The first whole line on standard output."""

        def look() -> str | None:
            line, newline, _ = self.output.partition("\n")
            if not newline and not self.running:
                raise AssertionError(f"{self.name} ended with {self._popen.returncode}:\n{self.log}")
            return line if newline else None

        try:
            return eventually(look, f"the ready line of {self.name}", _START_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None

    def wait(self, timeout_s: float) -> int:
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still ran after {timeout_s:g} s:\n{self.log}") from None

    def stop(self) -> int:
        """SIGTERM, then SIGKILL for it and all of its group. The exit code."""
        self._popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_STOP_S)
        return self.kill()

    def kill(self) -> int:
        """SIGKILL for it and all of its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        return self._popen.wait()
