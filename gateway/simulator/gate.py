"""How long a generation takes: not at all, a fixed time with so many at once, or until all are let go together."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from gateway.simulator.config import SimulatorConfig


class Gate(Protocol):
    async def generate(self, started: Callable[[], None]) -> None:
        """Take the time of one generation; `started` is called when it leaves the queue."""
        ...

    def release(self) -> None:
        """Let go whatever is held."""
        ...


class Instant:
    async def generate(self, started: Callable[[], None]) -> None:
        started()

    def release(self) -> None:
        pass


class Latency:
    """`gen_seconds` each, at most `max_num_seqs` at once (0: no limit), first come first served."""

    def __init__(self, gen_seconds: float, max_num_seqs: int) -> None:
        self._gen_seconds = gen_seconds
        self._slots = asyncio.Semaphore(max_num_seqs) if max_num_seqs else None

    async def generate(self, started: Callable[[], None]) -> None:
        async with self._slot():
            started()
            await asyncio.sleep(self._gen_seconds)

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        if self._slots is None:
            yield
            return
        async with self._slots:
            yield

    def release(self) -> None:
        pass


# A batch of a known size is waited for, also on a machine that is so busy that its requests come in spurts.
_STRAGGLER_S: Final = 2.0


class Barrier:
    """All together, once `size` are held (0: no number is awaited), or nothing new has come for `idle_s`."""

    def __init__(self, idle_s: float, size: int = 0) -> None:
        self._idle_s = max(idle_s, _STRAGGLER_S) if size else idle_s
        self._size = size
        self._held = 0
        self._opened = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, started: Callable[[], None]) -> None:
        started()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._idle_s, self.release)
        opened = self._opened
        self._held += 1
        if self._held == self._size:
            self.release()
        try:
            await opened.wait()
        except asyncio.CancelledError:
            # A client that leaves is held no more; those that were let go are counted no more.
            self._held -= opened is self._opened
            raise

    def release(self) -> None:
        opened, self._opened = self._opened, asyncio.Event()
        self._held = 0
        if self._timer is not None:
            self._timer.cancel()
        opened.set()


def make_gate(config: SimulatorConfig) -> Gate:
    match config.mode:
        case "latency":
            return Latency(config.gen_seconds, config.max_num_seqs)
        case "barrier":
            return Barrier(config.barrier_idle_s, config.barrier_size)
    return Instant()
