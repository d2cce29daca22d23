"""The worker's end of the control channel, over a real socket pair."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from shared import channel
from shared.channel import Drain, Failed, Ready, Reload, Start
from shared.config import Settings, WorkerConfig
from workers.supervision import Supervision, read_start

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG = WorkerConfig(settings=Settings(), slot=3, instance="0123456789abcdef", source_ip=None, redis_url="unix://x")


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The supervisor's and the worker's."""
    supervisor, worker = socket.socketpair()
    yield supervisor, worker
    supervisor.close()
    worker.close()


def test_the_start_is_read_and_nothing_after_it(ends: tuple[socket.socket, socket.socket]) -> None:
    supervisor, worker = ends
    supervisor.sendall(channel.encode(Start(CONFIG)) + b"next")
    assert read_start(worker) == Start(CONFIG)
    assert worker.recv(100) == b"next"


def test_a_supervisor_that_is_gone_before_the_start(ends: tuple[socket.socket, socket.socket]) -> None:
    supervisor, worker = ends
    supervisor.sendall(b'{"type":')
    supervisor.close()
    with pytest.raises(EOFError):
        read_start(worker)


@pytest.mark.parametrize("line", [b"nonsense\n", channel.encode(Drain(1.0))])
def test_what_is_no_start_is_refused(ends: tuple[socket.socket, socket.socket], line: bytes) -> None:
    supervisor, worker = ends
    supervisor.sendall(line)
    with pytest.raises(ValueError, match=r"not a control message|expected start, got Drain"):
        read_start(worker)


async def test_orders_come_in_order_and_an_end_is_told(ends: tuple[socket.socket, socket.socket]) -> None:
    supervisor, worker = ends
    supervision = await Supervision.over(worker)
    first, second = Reload(Settings(max_in_flight=5)), Drain(7.0, replaced=True)
    supervisor.sendall(channel.encode(first) + channel.encode(second))
    assert await supervision.next_order() == first
    assert await supervision.next_order() == second
    supervisor.close()
    assert await supervision.next_order() is None
    await supervision.close()


async def test_an_order_that_is_cut_off_is_no_order(ends: tuple[socket.socket, socket.socket]) -> None:
    supervisor, worker = ends
    supervision = await Supervision.over(worker)
    supervisor.sendall(channel.encode(Drain(7.0))[:-1])
    supervisor.close()
    assert await supervision.next_order() is None
    await supervision.close()


async def test_a_supervisor_that_died_with_our_words_unread_is_only_gone(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """The kernel then reports a reset instead of an end; the worker drains all the same."""
    supervisor, worker = ends
    supervision = await Supervision.over(worker)
    supervision.tell(Ready(("m",)))
    assert supervisor.recv(1) == b"{"
    supervisor.close()
    assert await supervision.next_order() is None
    supervision.tell(Failed("nobody hears this"))
    await supervision.close()


async def test_what_is_told_arrives(ends: tuple[socket.socket, socket.socket]) -> None:
    supervisor, worker = ends
    supervision = await Supervision.over(worker)
    supervision.tell(Ready(("a", "b")))
    await supervision.close()
    with supervisor.makefile("rb") as lines:
        assert channel.decode_for_supervisor(lines.readline()) == Ready(("a", "b"))
        assert lines.readline() == b""


async def test_a_large_configuration_fits(ends: tuple[socket.socket, socket.socket]) -> None:
    supervisor, worker = ends
    supervision = await Supervision.over(worker)
    order = Reload(Settings(upstreams=tuple(f"http://10.0.0.{index}:8000" for index in range(2000))))
    supervisor.sendall(channel.encode(order))
    assert await supervision.next_order() == order
    await supervision.close()


def test_a_message_of_the_other_direction_is_not_understood() -> None:
    with pytest.raises(msgspec.ValidationError):
        channel.decode_for_worker(channel.encode(Ready(())))
