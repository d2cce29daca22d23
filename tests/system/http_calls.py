"""Blocking HTTP for tests: one-off calls, and connections whose requests can be left unread."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from http.client import HTTPMessage

# Longer than any poll is held.
_TIMEOUT_S: Final = 90.0


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One keep-alive connection. `send` and `receive` are apart, so that a poll can be held, or given up."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        self._http = HTTPConnection(parts.hostname or "", parts.port or 80, timeout=_TIMEOUT_S)
        self._headers = dict(headers or {})

    @property
    def local_port(self) -> int:
        port: int = self._http.sock.getsockname()[1]
        return port

    def fileno(self) -> int:
        """For `select`: whether a reply is there."""
        return self._http.sock.fileno()

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        """`body`: bytes as they are, anything else as JSON."""
        encoded = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._http.request(method, path, encoded, {"Content-Type": "application/json", **self._headers, **named})

    def receive(self) -> Reply:
        response = self._http.getresponse()
        return Reply(response.status, response.headers, response.read())

    def trickle(self, size_bytes: int) -> bytes:
        """The next few bytes of what arrives, as they are; nothing else can be received after that."""
        return self._http.sock.recv(size_bytes)

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        self.send(method, path, body, **headers)
        return self.receive()

    def post(self, path: str, body: Any = None, **headers: str) -> Reply:
        return self.call("POST", path, body, **headers)

    def get(self, path: str) -> Reply:
        return self.call("GET", path)

    def hold_back(self) -> None:
        """From now on the kernel keeps what is sent until the connection is closed: both arrive together."""
        self._http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)

    def close(self) -> None:
        """What a client does that gives up: nobody reads what was asked for."""
        self._http.close()


def call(method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
    """One request on a connection of its own."""
    parts = urlsplit(url)
    connection = Connection(url, headers)
    try:
        return connection.call(method, parts.path or "/", body)
    finally:
        connection.close()
