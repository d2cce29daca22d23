"""How long a worker that has nothing more to do stays for what nobody has fetched yet."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from shared.channel import Drain, Reload
from shared.config import Settings
from tests.waiting import until
from workers.worker import Worker

STOP = Drain(60.0, replaced=False)


class Idle(Worker):
    """A worker that is left with its orders alone."""

    def __init__(self, redis_url: str | None = None) -> None:
        self.orders: asyncio.Queue[Any] = asyncio.Queue()
        self.reloads: list[Settings] = []
        self._supervision: Any = SimpleNamespace(next_order=self.orders.get)
        self._dispatcher: Any = SimpleNamespace(wait_idle=self._nothing)
        self._config: Any = SimpleNamespace(settings=SimpleNamespace(redis_url=redis_url))

    async def _nothing(self) -> None:
        return

    def _reload(self, settings: Settings) -> None:
        self.reloads.append(settings)


async def test_a_reload_does_not_end_what_waits_for_its_client() -> None:
    """The embedded Redis ends with the gateway: its results are handed out until the supervisor says otherwise."""
    worker = Idle()
    drained = asyncio.create_task(worker._wait_drained(STOP))
    await worker.orders.put(Reload(Settings()))
    await until(lambda: worker.reloads)
    await worker.orders.put(Reload(Settings()))
    await until(lambda: len(worker.reloads) == 2)
    assert not drained.done()
    await worker.orders.put(STOP)
    await drained


@pytest.mark.parametrize("order", [None, STOP])
async def test_the_supervisor_ends_the_wait(order: Drain | None) -> None:
    worker = Idle()
    await worker.orders.put(order)
    await worker._wait_drained(STOP)


async def test_with_a_redis_that_stays_nothing_is_waited_for() -> None:
    await Idle("redis://elsewhere")._wait_drained(STOP)
