"""How long a generation takes: no time, a fixed time with a limit of concurrency, or until a barrier opens."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.simulator.config import SimulatorConfig


class Gate(Protocol):
    async def generate(self, started: Callable[[], None]) -> None:
        """Wait for the time of one generation; call `started` when it leaves the queue."""
        ...

    def release(self) -> None:
        """Release everything that is held; most gates hold nothing."""
        return


class Instant(Gate):
    async def generate(self, started: Callable[[], None]) -> None:
        started()


class Latency(Gate):
    """Take `gen_seconds` each, at most `max_num_seqs` at once (0: no limit), in the order of arrival."""

    def __init__(self, gen_seconds: float, max_num_seqs: int) -> None:
        self._gen_seconds = gen_seconds
        self._slots = asyncio.Semaphore(max_num_seqs) if max_num_seqs else nullcontext()

    async def generate(self, started: Callable[[], None]) -> None:
        async with self._slots:
            started()
            await asyncio.sleep(self._gen_seconds)


# How long to wait for the rest of a batch of known size: on a busy machine its requests arrive in bursts.
_STRAGGLER_S: Final = 2.0


class Barrier(Gate):
    """Release all together, once `size` are held (0: any number) or nothing new has arrived for `idle_s`."""

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
            # A client that disconnects is no longer held, unless its batch has been released.
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
