"""How late the loop is: measured against the loop's own clock, which these tests move."""

from __future__ import annotations

import asyncio

import pytest

from tests.waiting import until
from workers.duties.duties import LoopLag


async def measured(lag: LoopLag, looks: int) -> None:
    task = asyncio.create_task(lag.run())
    await until(lambda: len(lag._late_ms) >= looks)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_nothing_measured_is_no_lag() -> None:
    lag = LoopLag()
    assert lag.p99_ms() == lag.max_ms() == 0.0


async def test_a_stall_shows_in_the_maximum_and_a_single_one_not_in_the_p99(monkeypatch: pytest.MonkeyPatch) -> None:
    lag, loop = LoopLag(tick_s=0.0), asyncio.get_running_loop()
    now, stalls = [0.0], [0.0] * 100 + [0.25] + [0.0] * 100

    async def sleep(delay_s: float) -> None:
        if not stalls:
            raise asyncio.CancelledError
        now[0] += delay_s + stalls.pop()

    with monkeypatch.context() as patch:
        patch.setattr(loop, "time", lambda: now[0])
        patch.setattr(asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            await lag.run()
    assert lag.max_ms() == pytest.approx(250.0)
    assert lag.p99_ms() == pytest.approx(0.0)


async def test_the_window_is_bounded() -> None:
    lag = LoopLag(tick_s=0.0)
    await measured(lag, 1)
    lag._late_ms.extend([1.0] * 5000)
    assert len(lag._late_ms) == 1200
    assert lag.p99_ms() == 1.0
