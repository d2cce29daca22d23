"""The operators' address over real sockets: who asks too much of it, or in somebody else's name."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from tests.integration.gateway_process import GatewayProcess
from tests.waiting import DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path_factory.mktemp("admin-edge"), workers=1) as started:
        yield started


def status_of(gateway: GatewayProcess, head: str) -> int:
    host, _, port = gateway.admin_url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n")
        return int(connection.recv(100).split()[1])


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /status HTTP/1.1\r\nHost: localhost", 200),
        ("GET /status HTTP/1.1\r\nHost: evil.example:8001", 421),
        ("GET /status HTTP/1.1", 421),
        ("POST /reload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nOrigin: https://evil.example", 403),
        ("GET /status HTTP/1.1\r\nHost: localhost\r\nX: " + "x" * 65_536, 431),
        ("GET /status HTTP/1.1\r\nHost: localhost" + "\r\nX: y" * 200, 431),
        ("PUT /upstreams HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked", 400),
        *(
            (f"POST /workers/{slot}/restart HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0", 404)
            for slot in ("9" * 5_000, "9" * 9, "-1", "+1", "1_0", "%D9%A3", "x")
        ),
    ],
    ids=[
        "fine",
        "another name",
        "no name",
        "another site",
        "a large header",
        "many headers",
        "two lengths",
        *(f"slot {which}" for which in range(7)),
    ],
)
def test_what_is_answered(gateway: GatewayProcess, head: str, status: int) -> None:
    """B14"""
    assert status_of(gateway, head) == status


def test_a_body_without_end_is_cut(gateway: GatewayProcess) -> None:
    host, _, port = gateway.admin_url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        connection.sendall(
            b"PUT /upstreams HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n" + b" " * 70_000
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
