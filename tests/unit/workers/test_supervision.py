"""The worker's end of the control channel, over a real socket pair."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from shared import channel
from shared.channel import Drain, Failed, Prepare, Ready, Reload, Start
from shared.config import Settings, WorkerConfig
from shared.core.callers import ApiKey
from workers.supervision import Supervision, read_start

if TYPE_CHECKING:
    from collections.abc import Iterator

    Ends = tuple[socket.socket, socket.socket]

CONFIG = WorkerConfig(settings=Settings(), slot=3, instance="0123456789abcdef", source_ip=None, redis_url="unix://x")


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The supervisor's and the worker's."""
    supervisor, worker = socket.socketpair()
    yield supervisor, worker
    supervisor.close()
    worker.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def not_prepared(_: socket.socket) -> None:
    raise AssertionError("nobody said prepare")


def send_start(supervisor: socket.socket, listener: socket.socket, config: WorkerConfig = CONFIG) -> None:
    socket.send_fds(supervisor, [channel.encode(Start(config))], [listener.fileno()])


def test_the_start_and_its_socket_are_read_and_nothing_after_them(ends: Ends, listener: socket.socket) -> None:
    supervisor, worker = ends
    send_start(supervisor, listener)
    supervisor.sendall(b"next")
    start, received = read_start(worker, not_prepared)
    with received:
        assert start == Start(CONFIG)
        assert received.getsockname() == listener.getsockname()
        assert not received.get_inheritable()
    assert worker.recv(100) == b"next"


def test_a_spare_prepares_before_it_reads_its_start(ends: Ends, listener: socket.socket) -> None:
    supervisor, worker = ends
    supervisor.sendall(channel.encode(Prepare()))
    start, received = read_start(worker, lambda _: send_start(supervisor, listener))
    received.close()
    assert start == Start(CONFIG)


def test_a_start_of_many_keys_is_read(ends: Ends, listener: socket.socket) -> None:
    supervisor, worker = ends
    keys = tuple(ApiKey(f"key-{index:05}", f"{index:064x}") for index in range(1000))
    config = msgspec.structs.replace(CONFIG, settings=Settings(api_keys=keys))
    send_start(supervisor, listener, config)
    start, received = read_start(worker, not_prepared)
    received.close()
    assert start.config == config


@pytest.mark.parametrize("said", [b"", b'{"type":', channel.encode(Prepare())])
def test_a_supervisor_that_is_gone_before_the_start(ends: Ends, said: bytes) -> None:
    supervisor, worker = ends
    supervisor.sendall(said)
    supervisor.close()
    with pytest.raises(EOFError):
        read_start(worker, lambda _: None)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"nonsense\n", "not a control message"),
        (channel.encode(Drain(1.0)), "expected start and a socket, got Drain"),
        (channel.encode(Start(CONFIG)), "expected start and a socket, got Start and None"),
    ],
)
def test_what_is_no_start_is_refused(ends: Ends, line: bytes, complaint: str) -> None:
    supervisor, worker = ends
    supervisor.sendall(line)
    with pytest.raises(ValueError, match=complaint):
        read_start(worker, not_prepared)


async def test_orders_come_in_order_and_an_end_is_told(ends: Ends) -> None:
    supervisor, worker = ends
    supervision = await Supervision.over(worker)
    first, second = Reload(Settings(max_in_flight=5)), Drain(7.0, replaced=True)
    supervisor.sendall(channel.encode(first) + channel.encode(second))
    assert await supervision.next_order() == first
    assert await supervision.next_order() == second
    supervisor.close()
    assert await supervision.next_order() is None
    await supervision.close()


async def test_an_order_that_is_cut_off_is_no_order(ends: Ends) -> None:
    supervisor, worker = ends
    supervision = await Supervision.over(worker)
    supervisor.sendall(channel.encode(Drain(7.0))[:-1])
    supervisor.close()
    assert await supervision.next_order() is None
    await supervision.close()


async def test_a_supervisor_that_died_with_our_words_unread_is_only_gone(
    ends: Ends,
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


async def test_what_is_told_arrives(ends: Ends) -> None:
    supervisor, worker = ends
    supervision = await Supervision.over(worker)
    supervision.tell(Ready(("a", "b")))
    await supervision.close()
    with supervisor.makefile("rb") as lines:
        assert channel.decode_for_supervisor(lines.readline()) == Ready(("a", "b"))
        assert lines.readline() == b""


async def test_a_large_configuration_fits(ends: Ends) -> None:
    supervisor, worker = ends
    supervision = await Supervision.over(worker)
    order = Reload(Settings(upstreams=tuple(f"http://10.0.0.{index}:8000" for index in range(2000))))
    supervisor.sendall(channel.encode(order))
    assert await supervision.next_order() == order
    await supervision.close()


def test_a_message_of_the_other_direction_is_not_understood() -> None:
    with pytest.raises(msgspec.ValidationError):
        channel.decode_for_worker(channel.encode(Ready(())))
