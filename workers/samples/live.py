"""A sample that this worker runs, and how it ends: what the dispatcher and the execution share."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

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


class Pace(Value, frozen=True):
    """The waits for a store that does not answer; tests hand in shorter times.

    `store_retry_first_s` and `store_retry_longest_s`: the pauses between attempts to reach it. By then the client has
    long been answered "try again". `duplicate_waits_s`: how long a duplicate submission waits for the first one to be
    entered; well below the SDK's 60 s for a submission.
    """

    store_retry_first_s: float = 0.1
    store_retry_longest_s: float = 2.0
    duplicate_waits_s: float = 10.0


STANDARD_PACE: Final = Pace()


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
    WAITING = "waiting"  # settling, but the store does not take the ending yet


class Executes(Protocol):
    async def execute(self, sample: LiveSample) -> Ending: ...


class LiveSample(Entity):
    """A sample that this worker owns, or is about to own.

    `request_id`: its name for the client and in the upstream's log. `is_begun`: the store is known to hold it as ours;
    a sample that turns out to be another worker's is dropped. `awaited`: made by the first duplicate that arrives
    before the store has said who was first. `stop`: the ending that somebody outside decided. `trace`: the client's
    traceparent.
    """

    session: SamplingSession
    key: SampleKey
    request_id: str
    spec: SampleSpec
    claim: Claim
    target: Target
    held_bytes: int
    holding: Holding
    trace: str | None = None
    is_begun: bool = False
    awaited: asyncio.Future[Header | None] | None = None
    task: asyncio.Task[None] | None = None
    phase: Phase = Phase.BEGINNING
    stop: Ending | None = None
    paused_reason: str | None = None

    async def first_header(self, wait_s: float) -> Header:
        """Return the header of the first claim, as soon as the submission under way knows it.

        Raise `Overloaded` if that takes longer than `wait_s`, and the `StoreError` that the submission met.
        """
        ours = Header(State.PENDING, self.claim)
        if self.is_begun:
            return ours
        if self.awaited is None:
            self.awaited = asyncio.get_running_loop().create_future()
            # Retrieve an exception, so that asyncio does not complain when every duplicate has gone away.
            self.awaited.add_done_callback(lambda future: future.cancelled() or future.exception())
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.shield(self.awaited) or ours
        except TimeoutError:
            text = "this sample is still being entered into the result store; send it again"
            raise Overloaded("store", text) from None

    def begin_failed(self, error: StoreError) -> None:
        """Raise `error` in the duplicates that wait for this sample: nobody will learn who was first."""
        if self.awaited is not None:
            self.awaited.set_exception(error)
            # The traceback that they raise holds frames that hold this sample: a cycle, with the prompt in it.
            self.awaited = None

    def end_early(self, ending: Ending) -> bool:
        """End the sample with `ending`, unless it has already ended otherwise; return whether it does.

        A result that waits for the store may still be written first. That is why a drain does not replace it.
        """
        decided = self.decide(ending)
        if decided:
            self.interrupt()
        return decided

    def decide(self, ending: Ending) -> bool:
        """Do the cheap part of `end_early`: the execution goes on until `interrupt`."""
        if self.stop is not None or self.phase is Phase.SETTLING:
            return False
        if self.phase is Phase.WAITING and ending.state is State.ORPHANED:
            return False
        self.stop = ending
        return True

    def interrupt(self) -> None:
        # Before it executes there is nothing to interrupt: `Dispatcher._execute` looks at `stop` first.
        if self.phase is Phase.EXECUTING and self.task is not None:
            self.task.cancel()


def end_all(samples: Iterable[LiveSample], state: State) -> int:
    """Decide now that these samples end with `state`, interrupt them in slices, and return how many end this way."""
    ended = [sample for sample in samples if sample.decide(Ending(state))]
    in_slices(LiveSample.interrupt, ended)
    return len(ended)
