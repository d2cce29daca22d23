"""Following a cluster's redirections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from shared.core.errors import StoreRefused, StoreUnavailable
from shared.redis.cluster_commands import ClusterCommands
from shared.redis.commands import Script
from shared.redis.connection import Redirected, error_of

if TYPE_CHECKING:
    from shared.redis.cluster import Shards


class FakeCommands:
    """Answer with the next of the answers, and repeat the last one."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked: list[bool] = []

    async def call(self, *_: object, asking: bool = False) -> object:
        self.asked.append(asking)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    run = call


class FakeShard:
    def __init__(self, commands: FakeCommands) -> None:
        self.commands = commands


class FakeShards:
    """A cluster in which `first` owns everything and redirections lead to `other`."""

    def __init__(self, first: FakeCommands, other: FakeCommands) -> None:
        self.first, self.other = FakeShard(first), FakeShard(other)
        self.refreshes = 0

    def owner(self, slot: int) -> FakeShard:
        return self.first

    def follow(self, redirected: Redirected) -> FakeShard:
        return self.other

    def refresh_soon(self) -> None:
        self.refreshes += 1


MOVED = "MOVED 42 10.0.0.1:7000"
ASK = "ASK 42 10.0.0.1:7000"


def commands_over(shards: FakeShards) -> ClusterCommands:
    return ClusterCommands(cast("Shards", shards))


async def do(commands: ClusterCommands, how: str) -> Any:
    return await (commands.call("GET", "key") if how == "call" else commands.run(Script("return 1"), ["key"]))


@pytest.mark.parametrize("how", ["call", "run"])
@pytest.mark.parametrize(("reply", "asking"), [(MOVED, False), (ASK, True)])
async def test_a_redirection_is_followed(how: str, reply: str, asking: bool) -> None:
    shards = FakeShards(FakeCommands(Redirected(reply)), FakeCommands("there"))
    assert await do(commands_over(shards), how) == "there"
    assert shards.other.commands.asked == [asking]


async def test_asking_holds_for_one_redirection_only() -> None:
    shards = FakeShards(FakeCommands(Redirected(ASK)), FakeCommands(Redirected(MOVED), "there"))
    assert await do(commands_over(shards), "call") == "there"
    assert shards.other.commands.asked == [True, False]


@pytest.mark.parametrize("how", ["call", "run"])
async def test_nodes_that_point_at_each_other_are_given_up(how: str) -> None:
    shards = FakeShards(FakeCommands(Redirected(MOVED)), FakeCommands(Redirected(MOVED)))
    with pytest.raises(StoreUnavailable, match="redirects this key again and again") as caught:
        await do(commands_over(shards), how)
    assert not caught.value.maybe_done


@pytest.mark.parametrize("how", ["call", "run"])
async def test_a_node_that_is_down_makes_the_map_be_asked_for(how: str) -> None:
    shards = FakeShards(FakeCommands(StoreUnavailable("down", maybe_done=False)), FakeCommands("there"))
    with pytest.raises(StoreUnavailable, match="down"):
        await do(commands_over(shards), how)
    assert shards.refreshes == 1


@pytest.mark.parametrize(
    ("text", "host", "port", "asking"),
    [
        (MOVED, "10.0.0.1", 7000, False),
        (ASK, "10.0.0.1", 7000, True),
        ("MOVED 1 ::1:7", "::1", 7, False),
        ("MOVED 1 :7", "", 7, False),
    ],
)
def test_redirections_are_read(text: str, host: str, port: int, asking: bool) -> None:
    error = error_of(Exception(text))
    assert isinstance(error, Redirected)
    assert (error.host, error.port, error.asking) == (host, port, asking)
    # The store of a single server shows it as a refusal that says what to do.
    assert isinstance(error, StoreRefused)
    assert "use redis+cluster://" in str(error)
