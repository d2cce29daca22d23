"""What becomes of an ending that the store does not take: it waits, or another one is written in its place.

A store that is away, or full, takes it later: it waits. One that can never take it, or refuses it again and again, must
not hold it for ever: its client would be told "still running" until it gives up.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from shared.core.lifecycle import State
from shared.core.model import Category, Failure

# A server has its own needs, its connections and other results beside this one. A result that takes more than this
# would wait for a store that is all but empty, and keep every new sample out until then.
_LARGEST_SHARE: Final = 0.75
# Any server has room for as much: no need to ask.
_FITS_ANYWHERE_BYTES: Final = 256 * 1024
# With pauses that grow to 2 s: half a minute, in which an operator's change of permissions is over.
REFUSALS_MOST: Final = 20

REFUSED_BY_STORE: Final = Failure(
    "the result store refuses to keep the result of this sample; the gateway's log says why", Category.SERVER
)


class Next(Enum):
    AGAIN = "again"
    FAIL = "fail"
    GIVE_UP = "give_up"


def may_never_fit(result_bytes: int) -> bool:
    """Whether the store's limit is worth asking for."""
    return result_bytes > _FITS_ANYWHERE_BYTES


def never_fits(result_bytes: int, limit_bytes: int) -> Failure | None:
    """Why a store with `limit_bytes` of memory (0: no limit) never takes such a result; None when it may."""
    if not limit_bytes or result_bytes <= limit_bytes * _LARGEST_SHARE:
        return None
    return Failure(
        f"the result is {_mib(result_bytes)}, which the result store of {_mib(limit_bytes)} cannot keep: ask for fewer"
        " samples, tokens or top-k logprobs at once, or have its memory raised (--redis-memory, maxmemory)",
        Category.SERVER,
    )


def after_refusal(state: State, refusals: int) -> Next:
    """What to do when the store has refused an ending of this kind so often."""
    if refusals < REFUSALS_MOST:
        return Next.AGAIN
    return Next.FAIL if state is State.READY else Next.GIVE_UP


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
