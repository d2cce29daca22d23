"""Connections that are known to be with one worker, and the Tinker API over them.

The kernel picks the worker of a connection. Which one it was is seen from outside: the server's end of the connection
is an open file of exactly one worker process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import psutil

from tests.waiting import eventually

if TYPE_CHECKING:
    from tests.system.http_calls import Connection, Reply
    from tests.system.stack import Gateway, Stack

# Two workers: the chance that all of them go to one is 2 ** -63.
_TRIES: Final = 64
_PROTOBUF: Final = "application/x-protobuf"


def connect_to(gateway: Gateway, slot: int, key: str | None = None) -> Connection:
    """A keep-alive connection that the slot's worker serves."""
    for _ in range(_TRIES):
        # Anew each time: it may be replaced meanwhile.
        pid = eventually(
            lambda: gateway.workers()[slot], f"slot {slot} to be ready", until=lambda worker: worker["state"] == "ready"
        )["pid"]
        connection = gateway.connect(key)
        assert connection.get("/api/v1/healthz").status == 200
        if _has_peer(pid, connection.local_port):
            return connection
        connection.close()
    raise AssertionError(f"none of {_TRIES} connections went to slot {slot}")


def _has_peer(pid: int, port: int) -> bool:
    try:
        ends = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return False
    return any(end.raddr and end.raddr.port == port and end.status == psutil.CONN_ESTABLISHED for end in ends)


class Client:
    """A client session and a sampling session of a model, as an SDK makes them, usable over any connection."""

    def __init__(self, connection: Connection, model: str) -> None:
        self.session_id = _created(connection, "create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0"})
        self.model = model
        self.sampling_session_id = self.sampling_session(connection, 0)

    def sampling_session(self, connection: Connection, ordinal: int) -> str:
        body = {"session_id": self.session_id, "sampling_session_seq_id": ordinal, "base_model": self.model}
        return _created(connection, "create_sampling_session", body, "sampling_session_id")

    def body(self, seq_id: int, prompt: list[int], **fields: Any) -> dict[str, Any]:
        """An `asample` body; `fields` replace or add, `params` go into sampling_params."""
        params = {"max_tokens": 8, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "seed": 1, **fields.pop("params", {})}
        return {
            "sampling_session_id": self.sampling_session_id,
            "seq_id": seq_id,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": params,
            "type": "sample",
            **fields,
        }


def _created(connection: Connection, path: str, body: dict[str, Any], key: str = "session_id") -> str:
    reply = connection.post(f"/api/v1/{path}", body)
    assert reply.status == 200, reply
    made: str = reply.json()[key]
    return made


def submit(connection: Connection, body: dict[str, Any]) -> dict[str, Any]:
    reply = connection.post("/api/v1/asample", body)
    assert reply.status == 200, reply
    promise: dict[str, Any] = reply.json()
    return promise


def send_poll(connection: Connection, request_id: str) -> None:
    """Ask for the result and leave the reply unread."""
    body = {"request_id": request_id, "allow_metadata_only": True}
    connection.send("POST", "/api/v1/retrieve_future", body, Accept=_PROTOBUF)


def poll(connection: Connection, request_id: str) -> Reply:
    send_poll(connection, request_id)
    return connection.receive()


def open_stack_client(stack: Stack, slot: int = 0, key: str | None = None) -> tuple[Connection, Client]:
    connection = connect_to(stack.gateway, slot, key)
    return connection, Client(connection, stack.model)
