"""The connection as handlers see it, where there is no socket beneath."""

from __future__ import annotations

from typing import Any

from shared.http.exchange import deliver
from shared.http.peer import Connection, connection


def test_a_scope_without_our_protocol_has_one_connection() -> None:
    scope: dict[str, Any] = {"type": "http"}
    assert connection(scope) is connection(scope)
    assert connection(scope).connected


def test_callbacks_are_called_once_or_not_at_all() -> None:
    calls: list[str] = []
    client, taken_back = Connection(), lambda: calls.append("taken back")
    client.add_lost_callback(lambda: calls.append("first"))
    client.add_lost_callback(taken_back)
    client.remove_lost_callback(taken_back)
    client.remove_lost_callback(taken_back)
    client.lose(broken=True)
    client.lose(broken=False)
    assert calls == ["first"]
    client.add_lost_callback(lambda: calls.append("late"))
    assert calls == ["first", "late"]
    assert client.broken and not client.connected


async def test_an_orderly_end_has_delivered() -> None:
    closed, cut = Connection(), Connection()
    closed.lose(broken=False)
    cut.lose(broken=True)
    assert await closed.drained() and not await cut.drained()


async def test_nothing_is_sent_to_who_has_left() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "http"}
    assert await deliver(scope, send, 200, [(b"a", b"b")], b"body")
    assert sent[0]["headers"] == [(b"a", b"b"), (b"content-length", b"4")]
    connection(scope).lose(broken=True)
    assert not await deliver(scope, send, 200, [], b"body")
    assert len(sent) == 2
