"""A wave of dials: so many in a turn of the loop, and one where each is slow."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from workers.upstream.client.connection import UpstreamConnection
from workers.upstream.client.dial import Dialler
from workers.upstream.client.port import Origin
from workers.upstream.connector import unbound_socket

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiohttp.connector import AddrInfoType

WAVE = 60


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0), backlog=2 * WAVE) as listener:
        yield listener.getsockname()[1]


class Wave:
    """Dials at once, each of which takes `connect_s` of CPU as the dialler sees it; `by_turn` counts the connects."""

    def __init__(self, port: int, connect_s: float) -> None:
        self._origin = Origin(False, "127.0.0.1", port)
        self._connect_s = connect_s
        self._cpu_s = 0.0
        self._looks = 0
        self._turn = 0
        self.by_turn: Counter[int] = Counter()
        self._dialler = Dialler(self._made, socket.AF_INET, 30.0, lambda: pytest.fail("no TLS"), cpu_s=self._clock)

    def _clock(self) -> float:
        self._looks += 1
        # The second look is behind the connect.
        self._cpu_s += self._connect_s if self._looks % 2 == 0 else 0.0
        return self._cpu_s

    def _made(self, address: AddrInfoType) -> socket.socket:
        self.by_turn[self._turn] += 1
        return unbound_socket(address)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()

        def made() -> UpstreamConnection:
            return UpstreamConnection(loop, memoryview(bytearray(1024)), 1024, lambda _: None)

        dials = [asyncio.create_task(self._dialler.dial(self._origin, made)) for _ in range(WAVE)]
        while not all(dial.done() for dial in dials):
            await asyncio.sleep(0)
            self._turn += 1
        for dial in dials:
            dial.result().abort()
        assert sum(self.by_turn.values()) == WAVE
        await asyncio.sleep(0)


async def test_cheap_dials_go_many_in_a_turn(port: int) -> None:
    wave = Wave(port, 0.00003)
    await wave.run()
    assert len(wave.by_turn) <= WAVE / 8


async def test_slow_dials_go_one_in_a_turn(port: int) -> None:
    """Whoever goes on in the turn in which that is found out, does."""
    wave = Wave(port, 0.001)
    await wave.run()
    counts = [count for _, count in sorted(wave.by_turn.items())]
    assert counts.count(1) > WAVE / 2
    assert set(counts[2:]) == {1}
