"""A sample that this worker runs, and how it ends: what the dispatcher and the execution share."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from shared.core import ids
from shared.core.errors import Overloaded
from shared.core.lifecycle import State
from shared.core.model import Entity, Value
from shared.core.record import Header
from shared.loop.slices import in_slices
from shared.wire.sdk.calls import failure_body

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shared.core.errors import StoreError
    from shared.core.model import Failure, SampleKey, SampleSpec, SamplingSession
    from shared.core.record import Claim
    from workers.samples.quota import Holding
    from workers.upstream.catalogue import Target


# A duplicate does not outwait the store: well below the SDK's 60 s for a submission.
_DUPLICATE_WAITS_S: Final = 10.0


class Ending(Value, frozen=True):
    """A terminal state and its payload, decided but not yet written."""

    state: State
    payload: bytes = b""

    @classmethod
    def failed(cls, failure: Failure) -> Ending:
        return cls(State.FAILED, failure_body(failure))


class Phase(Enum):
    BEGINNING = "beginning"
    EXECUTING = "executing"
    SETTLING = "settling"
    WAITING = "waiting"  # settling, and the store does not take it yet


class Executes(Protocol):
    async def execute(self, running: LiveSample) -> Ending: ...


class LiveSample(Entity):
    """A sample that this worker owns, or is about to.

    `is_begun`: the store is known to hold it as ours; one that turns out to be another's is let go. `awaited`: made by
    the first duplicate that wants to know who was first before that is known.
    """

    session: SamplingSession
    key: SampleKey
    spec: SampleSpec
    claim: Claim
    target: Target
    held_bytes: int
    holding: Holding
    is_begun: bool = False
    awaited: asyncio.Future[Header | None] | None = None
    task: asyncio.Task[None] | None = None
    phase: Phase = Phase.BEGINNING
    stop: Ending | None = None
    paused_reason: str | None = None
    trace: str | None = None  # traceparent of who asked for it

    @property
    def request_id(self) -> str:
        """As the client knows it, and as it stands in the upstream's log."""
        return ids.request_id(self.session, self.key.seq_id)

    async def known(self) -> Header:
        """Who was first, as soon as the submission that is under way knows it. Raises `Overloaded`, `StoreError`."""
        first = None if self.is_begun else await self._awaited()
        return first or Header(State.PENDING, self.claim)

    async def _awaited(self) -> Header | None:
        if self.awaited is None:
            self.awaited = asyncio.get_running_loop().create_future()
            self.awaited.add_done_callback(_mark_retrieved)
        try:
            async with asyncio.timeout(_DUPLICATE_WAITS_S):
                return await asyncio.shield(self.awaited)
        except TimeoutError:
            text = "this sample is still being entered into the result store; send it again"
            raise Overloaded("store", text) from None

    def was_first(self, first: Header | None) -> None:
        """Tell the duplicates that wait for it; None: this one was."""
        if self.awaited is not None:
            self.awaited.set_result(first)

    def not_known(self, error: StoreError) -> None:
        """Tell the duplicates that wait for it that nobody will know."""
        if self.awaited is not None:
            self.awaited.set_exception(error)
            # What they raise holds frames that hold this: a circle, with the prompt in it.
            self.awaited = None

    def ending(self) -> Ending | None:
        """What somebody outside has decided it ends with."""
        return self.stop

    def end_early(self, ending: Ending) -> bool:
        """End it with `ending` unless it has already ended otherwise; False then.

        A result that waits for the store may still get there first. So it is not given up for a drain.
        """
        decided = self.decide(ending)
        if decided:
            self.interrupt()
        return decided

    def decide(self, ending: Ending) -> bool:
        """As `end_early`, but what executes goes on until it is interrupted. Costs next to nothing."""
        if self.stop is not None or self.phase is Phase.SETTLING:
            return False
        if self.phase is Phase.WAITING and ending.state is State.ORPHANED:
            return False
        self.stop = ending
        return True

    def interrupt(self) -> None:
        # Before it executes there is nothing to interrupt: `_execute` looks at `stop` first.
        if self.phase is Phase.EXECUTING and self.task is not None:
            self.task.cancel()


def _mark_retrieved(future: asyncio.Future[Header | None]) -> None:
    """Keep asyncio from complaining about an exception when the duplicates that wait for it have gone away."""
    if not future.cancelled():
        future.exception()


def end_all(runnings: Iterable[LiveSample], state: State) -> int:
    """Decide it for all of them now, and interrupt them in slices. Returns how many end for that."""
    ended = [running for running in runnings if running.decide(Ending(state))]
    in_slices(LiveSample.interrupt, ended)
    return len(ended)
