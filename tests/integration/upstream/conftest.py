"""Workers run on uvloop, which words some ends of a connection in its own way; asyncio is the second opinion.

And what several files of this folder need.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import uvloop

from gateway.simulator.config import SimulatorConfig
from gateway.simulator.simulator import Simulator
from shared.core.upstream_protocol import ClientChoice, ProtocolChoice

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture
async def simulator() -> AsyncIterator[Simulator]:
    async with Simulator(SimulatorConfig()) as made:
        yield made


@pytest.fixture(params=list(ClientChoice), ids=lambda choice: choice.value)
def upstream_client(request: pytest.FixtureRequest) -> ClientChoice:
    """Both adapters of the client port, in turn."""
    chosen: ClientChoice = request.param
    return chosen


@pytest.fixture
def both_clients(upstream_client: ClientChoice, monkeypatch: pytest.MonkeyPatch) -> ClientChoice:
    """Every `Line` of the test uses this adapter."""
    monkeypatch.setattr("tests.integration.upstream.lines.chosen_client", upstream_client)
    return upstream_client


@pytest.fixture(params=[ProtocolChoice.COMPLETIONS, ProtocolChoice.GENERATE], ids=lambda choice: choice.value)
def protocol(request: pytest.FixtureRequest) -> ProtocolChoice:
    """What goes wrong is the same by either."""
    chosen: ProtocolChoice = request.param
    return chosen
