from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

import pytest

from gateway.supervision import listeners as l
from shared.core.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def three() -> Iterator[l.Listeners]:
    opened = l.open_listeners("127.0.0.1", 0, 3, 64)
    yield opened
    opened.close()


def run_program(program: list[tuple[int, int, int, int]], random: int) -> int:
    """A classic BPF machine with the few instructions in use."""
    accumulator, counter = 0, 0
    while True:
        code, if_true, if_false, k = program[counter]
        counter += 1
        if code == 0x20:
            accumulator = random
        elif code == 0x94:
            accumulator %= k
        elif code == 0x15:
            counter += if_true if accumulator == k else if_false
        elif code == 0x16:
            return accumulator
        else:
            assert code == 0x06
            return k


@pytest.mark.parametrize("alive", [[0, 1, 2, 3], [0], [3], [1, 3], [0, 2, 3]])
def test_the_program_returns_each_living_slot_equally_often(alive: list[int]) -> None:
    program = l.steering_program(alive, 4)
    chosen = [run_program(program, random) for random in range(12)]
    assert {slot: chosen.count(slot) for slot in alive} == dict.fromkeys(alive, 12 // len(alive))


def accepted_by(three: l.Listeners, connections: int) -> list[int]:
    clients = [socket.create_connection(("127.0.0.1", three.port)) for _ in range(connections)]
    counts = []
    for listener in three.sockets:
        count = 0
        try:
            while True:
                listener.accept()[0].close()
                count += 1
        except BlockingIOError:
            counts.append(count)
    for client in clients:
        client.close()
    return counts


def test_the_kernel_obeys(three: l.Listeners) -> None:
    """B15: connections go to slots that live, and to all of them."""
    three.steer([0, 2])
    first, second, third = accepted_by(three, 60)
    assert second == 0
    assert first > 0
    assert third > 0
    three.steer([1])
    assert accepted_by(three, 20) == [0, 20, 0]


def test_with_nobody_alive_connections_queue_everywhere(three: l.Listeners) -> None:
    three.steer([1])
    three.steer([])
    assert all(accepted_by(three, 90))


def test_a_kernel_that_cannot_steer_is_logged_once(
    three: l.Listeners, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(l, "_SO_ATTACH_REUSEPORT_CBPF", 0x7FFF)
    three.steer([0])
    three.steer([1])
    assert caplog.messages == ["new connections cannot be steered away from dead workers"]
    assert sum(accepted_by(three, 30)) == 30


def test_all_slots_share_the_port_that_the_first_got(three: l.Listeners) -> None:
    assert {listener.getsockname() for listener in three.sockets} == {("127.0.0.1", three.port)}
    assert three.address == f"127.0.0.1:{three.port}"


def test_a_port_that_another_gateway_listens_on_is_refused(three: l.Listeners) -> None:
    """SO_REUSEPORT would let us in."""
    with pytest.raises(StartError, match=f"127.0.0.1:{three.port} is used by another process"):
        l.open_listeners("127.0.0.1", three.port, 1, 64)


@pytest.mark.parametrize(
    ("host", "reason"),
    [("192.0.2.1", "192.0.2.1 is not an address of this machine"), ("no such host", "neither an address of this")],
)
def test_hosts_that_cannot_be_served(host: str, reason: str) -> None:
    with pytest.raises(StartError, match=reason):
        l.open_listeners(host, 0, 1, 64)
    with pytest.raises(StartError, match=reason):
        l.open_single(host, 0)


def test_a_taken_port_is_refused_with_the_flag_to_change() -> None:
    with l.open_single("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match="another --admin-port"):
            l.open_single("127.0.0.1", port)
        with pytest.raises(StartError, match="another --port"):
            l.open_single("127.0.0.1", port, "--")


def test_ipv6() -> None:
    opened = l.open_listeners("::1", 0, 2, 64)
    assert opened.address == f"[::1]:{opened.port}"
    opened.close()


def test_a_backlog_that_the_kernel_cuts_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        l.warn_short_queue(50_000, 4096)
        l.warn_short_queue(4096, 4096)
        l.warn_short_queue(50_000, None)
    assert len(caplog.records) == 1
    assert vars(caplog.records[0])["somaxconn"] == 4096
