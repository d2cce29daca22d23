"""Exchanges that are ended from this side: by a cancel, or since the upstream drains."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from shared.core.faults import BreakKind, Fault, FaultClass
from tests.integration.upstream.lines import line
from tests.waiting import until
from workers.upstream import upstream as upstreams

if TYPE_CHECKING:
    from gateway.simulator.simulator import Simulator
    from workers.upstream.upstream import Upstream

pytestmark = pytest.mark.usefixtures("both_clients")


async def test_a_cancel_closes_the_upstream_connection(simulator: Simulator) -> None:
    """D7"""
    simulator.set_faults([{"kind": "hold"}])
    async with line(simulator.url) as made:
        exchange = asyncio.create_task(made.ask())
        await until(lambda: simulator.stats()["in_flight"] == 1)
        exchange.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange
        await until(lambda: simulator.stats()["aborted"] == 1)
        assert simulator.stats()["in_flight"] == 0
        assert not made.upstream.attempts


async def test_a_break_off_is_a_fault_and_closes_the_connection(simulator: Simulator) -> None:
    simulator.set_faults([{"kind": "hold"}])
    async with line(simulator.url) as made:
        exchange = asyncio.create_task(made.ask())
        await until(lambda: simulator.stats()["in_flight"] == 1)
        (attempt,) = made.upstream.attempts
        attempt.break_off(BreakKind.DRAINING)
        attempt.break_off(BreakKind.READ_TIMEOUT)
        fault = await exchange
        assert isinstance(fault, Fault)
        assert (fault.kind, fault.upstream_down) == (FaultClass.INTERRUPTED, True)
        await until(lambda: simulator.stats()["aborted"] == 1)


@pytest.mark.parametrize("cancel_first", [False, True])
async def test_a_cancel_is_not_lost_in_a_break_off(simulator: Simulator, cancel_first: bool) -> None:
    """D7: both in one turn of the loop; a client's cancel must not end as one more execution."""
    simulator.set_faults([{"kind": "hold"}])
    async with line(simulator.url) as made:
        exchange = asyncio.create_task(made.ask())
        await until(lambda: simulator.stats()["in_flight"] == 1)
        (attempt,) = made.upstream.attempts
        if cancel_first:
            exchange.cancel()
        attempt.break_off(BreakKind.DRAINING)
        if not cancel_first:
            exchange.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange


async def test_an_upstream_that_drains_is_noticed_by_the_probe(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D18: old connections open without a byte, new ones refused; not a moment before it has refused for long."""
    # It answered a probe a moment ago, and is not believed for it.
    monkeypatch.setattr(upstreams, "_QUIET_S", 0.0)
    async with line(simulator.url) as made:
        simulator.set_faults([{"kind": "hold"}])
        exchange = asyncio.create_task(made.ask())
        await until(lambda: simulator.stats()["in_flight"] == 1)
        await made.pool.probe()
        assert not refuses(made.upstream)
        simulator.set_faults([{"kind": "drain"}])
        await made.pool.probe()
        assert refuses(made.upstream)
        assert not exchange.done()
        monkeypatch.setattr(upstreams, "REFUSED_FOR_S", 0.0)
        await made.pool.probe()
        fault = await exchange
        assert isinstance(fault, Fault)
        assert fault.kind is FaultClass.INTERRUPTED
        assert BreakKind.DRAINING.value in fault.message


async def test_what_waits_for_a_connection_is_not_interrupted_by_a_break_off(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D18: it was never executed, and may be sent elsewhere as often as needed."""
    monkeypatch.setattr(upstreams, "REFUSED_FOR_S", 0.0)
    simulator.set_faults([{"kind": "hold"}])
    async with line(simulator.url, max_connections=1) as made:
        held = asyncio.create_task(made.ask("held-a1"))
        await until(lambda: simulator.stats()["in_flight"] == 1)
        queued = asyncio.create_task(made.ask("queued-a1"))
        await until(lambda: len(made.upstream.attempts) == 2)
        simulator.set_faults([{"kind": "drain"}])
        await made.pool.probe()
        faults = await asyncio.gather(held, queued)
        assert all(isinstance(fault, Fault) for fault in faults), faults
        assert [fault.kind for fault in faults] == [FaultClass.INTERRUPTED, FaultClass.NEVER_EXECUTED]  # type: ignore[union-attr] # see above


async def test_a_probe_does_not_wait_behind_samples(simulator: Simulator) -> None:
    """D18: with every connection in use, a drain is noticed all the same."""
    simulator.set_faults([{"kind": "hold"}])
    async with line(simulator.url, max_connections=1) as made:
        exchanges = [asyncio.create_task(made.ask()) for _ in range(3)]
        await until(lambda: simulator.stats()["in_flight"] == 1)
        await made.pool.learn_models()
        assert made.pool.catalogue.known
        for exchange in exchanges:
            exchange.cancel()
        await asyncio.gather(*exchanges, return_exceptions=True)


def refuses(upstream: Upstream) -> bool:
    return upstream.refused_since_s is not None
