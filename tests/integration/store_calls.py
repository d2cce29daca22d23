"""What the tests of stores on real servers say and do alike."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Final, TypeVar

from shared.core.errors import StoreError
from shared.core.model import SampleKey
from shared.core.record import Claim
from shared.store.one_server import RedisStore
from tests.waiting import DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

OWNER: Final = "owner-0000000000"
CLAIM: Final = Claim(OWNER, 1, 1, bytes(16))
TTL_S: Final = 3600.0
KEY: Final = SampleKey("session", 1)
_PAUSE_S: Final = 0.005

T = TypeVar("T")


def make_store(url: str, deadline_s: float = 10.0) -> RedisStore:
    return RedisStore(url, rng=Random(1), deadline_s=deadline_s)


async def in_the_end(call: Callable[[], Awaitable[T]]) -> T:
    """What a worker does: once more, until the store takes it. Raises what it said last when it never is."""
    end_s = asyncio.get_running_loop().time() + DEADLINE_S
    while True:
        try:
            return await call()
        except StoreError:
            if asyncio.get_running_loop().time() > end_s:
                raise
            await asyncio.sleep(_PAUSE_S)
