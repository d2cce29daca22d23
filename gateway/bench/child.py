"""A child process that says when it is ready, and that is never left behind."""

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
    from collections.abc import Callable, Sequence

_PR_SET_PDEATHSIG: Final = 1
_KEPT_LINES: Final = 40
_LINE_LIMIT_BYTES: Final = 1024 * 1024
_libc = ctypes.CDLL(None)


class Child:
    """Runs `command` in a process group of its own.

    The terminal's Ctrl-C does not reach it, so that the parent decides the order of stopping; the kernel tells it when
    the parent is gone, whatever the parent died of.
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
        """None before it was started, and once it has ended."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def words(self) -> str:
        """The last that it wrote, to either stream."""
        return "\n".join(self._last_lines)

    async def start(self, timeout_s: float) -> str:
        """The first line on its standard output, which says that it is ready. Raises `StartError`."""
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
        """SIGTERM, after `grace_s` SIGKILL, and SIGKILL for whatever it left. The exit code; None if never started."""
        self._first_line.cancel()
        if self._process is None:
            return None
        try:
            await self._ask_to_exit(self._process.pid, grace_s)
        finally:
            # Whatever is left of the group: asyncio's `wait` returns only when nobody holds the pipes any more.
            _signal_quietly(self._process.pid, signal.SIGKILL, os.killpg)
            await self._process.wait()
            await asyncio.gather(*self._readers, return_exceptions=True)
        return self._process.returncode

    async def kill(self) -> None:
        """SIGKILL for it and all that it started, as a crash would."""
        assert self._process is not None
        _signal_quietly(self._process.pid, signal.SIGKILL, os.killpg)
        await self._process.wait()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _ask_to_exit(self, pid: int, grace_s: float) -> None:
        """SIGTERM, and `grace_s` to heed it."""
        loop = asyncio.get_running_loop()
        try:
            exit_descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        exited = asyncio.Event()
        loop.add_reader(exit_descriptor, exited.set)
        try:
            _signal_quietly(pid, signal.SIGTERM, os.kill)
            await asyncio.wait_for(exited.wait(), grace_s)
        except TimeoutError:
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
        # The other stream's reader may have more to say.
        await asyncio.wait(self._readers[1:], timeout=1.0)
        if not first.done():
            first.set_exception(StartError(f"{self.name} ended at once with exit code {code}. {self._quoted()}"))

    def _quoted(self) -> str:
        return f"Its own words:\n{self.words}" if self._last_lines else "It said nothing."


def _signal_quietly(pid: int, number: signal.Signals, send: Callable[[int, int], None]) -> None:
    with contextlib.suppress(ProcessLookupError):
        send(pid, number)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
