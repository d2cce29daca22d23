"""The connection as handlers see it, where there is no socket beneath."""

from __future__ import annotations

from shared.http.peer import Connection


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
