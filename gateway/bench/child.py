"""A child process that reports when it is ready and is never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections import deque
from typing import TYPE_CHECKING, Final

from shared.core.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Sequence

_PR_SET_PDEATHSIG: Final = 1
_KEPT_LINES: Final = 40
_LINE_LIMIT_BYTES: Final = 1024 * 1024
_libc = ctypes.CDLL(None)


class Child:
    """A command in a process group of its own.

    The terminal's Ctrl-C does not reach it, so the parent decides in which order processes stop. If the parent dies for
    any reason, the kernel sends it SIGTERM.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._first_line: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._readers: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running_pid(self) -> int | None:
        """Return the process id, or None before the start and after the end."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def output(self) -> str:
        """Return the last lines that it wrote to either stream."""
        return "\n".join(self._last_lines)

    async def start(self, timeout_s: float) -> str:
        """Start it and return its first line on standard output, which says that it is ready. Raises `StartError`."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT_BYTES,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._readers = [
            asyncio.create_task(self._read(self._process.stdout, self._first_line)),
            asyncio.create_task(self._read(self._process.stderr, None)),
        ]
        try:
            return await asyncio.wait_for(asyncio.shield(self._first_line), timeout_s)
        except TimeoutError:
            raise StartError(f"{self.name} was not ready after {timeout_s:g} s. {self._quoted()}") from None

    async def stop(self, grace_s: float) -> int | None:
        """Send SIGTERM, after `grace_s` SIGKILL to the group, and return the exit code (None if never started)."""
        self._first_line.cancel()
        if self._process is None:
            return None
        try:
            await self._ask_to_exit(self._process.pid, grace_s)
        finally:
            await self.kill()
        return self._process.returncode

    async def kill(self) -> None:
        """Send SIGKILL to it and everything that it started, as a crash would end them."""
        assert self._process is not None
        # The whole group, since asyncio's `wait` returns only when nobody holds the pipes any more.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _ask_to_exit(self, pid: int, grace_s: float) -> None:
        """Send SIGTERM and wait up to `grace_s` for the exit of the process itself, not of its group."""
        loop = asyncio.get_running_loop()
        try:
            exit_descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        exited = asyncio.Event()
        loop.add_reader(exit_descriptor, exited.set)
        try:
            os.kill(pid, signal.SIGTERM)
            await asyncio.wait_for(exited.wait(), grace_s)
        except (ProcessLookupError, TimeoutError):
            return
        finally:
            loop.remove_reader(exit_descriptor)
            os.close(exit_descriptor)

    async def _read(self, stream: asyncio.StreamReader, first: asyncio.Future[str] | None) -> None:
        while line := await stream.readline():
            text = line.decode("utf-8", "replace").rstrip()
            self._last_lines.append(text)
            if first is not None and not first.done():
                first.set_result(text)
        if first is not None and not first.done():
            await self._fail_start(first)

    async def _fail_start(self, first: asyncio.Future[str]) -> None:
        assert self._process is not None
        code = await self._process.wait()
        # The reader of the other stream may still hold an explanation.
        await asyncio.wait(self._readers[1:], timeout=1.0)
        if not first.done():
            first.set_exception(StartError(f"{self.name} ended at once with exit code {code}. {self._quoted()}"))

    def _quoted(self) -> str:
        return f"Its output:\n{self.output}" if self._last_lines else "It printed nothing."


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
