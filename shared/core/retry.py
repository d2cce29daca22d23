"""Decide what to do about a failed attempt: wait and try again, give up, or let the SDK submit the sample again.

There is no blanket rule. What was never executed may be sent again for as long as the operator allows; what may have
run is run again a bounded number of times, never beside itself; what is ambiguous is final, unless the operator says
otherwise. A blanket retry of every 5xx generates twice; none at all ends a training run for a router that restarted.

`decide` is pure: time and randomness come in as arguments.

The same is decided for an ending that the store does not take. It waits for a store that is away or full. If the store
can never take it, or refuses it again and again, another ending is written in its place: otherwise its client would get
"still running" until it gives up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from shared.core.faults import Fault, FaultClass
from shared.core.lifecycle import State
from shared.core.model import Category, Failure

# A paused engine answers 200 "abort" as often as it is asked; weight swaps of minutes are survived, not endless ones.
MAX_ABORTS: Final = 16
_FIRST_DELAY_S: Final = 0.25
_LONGEST_DELAY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Policy:
    max_reexecutions: int = 1
    retry_ambiguous: bool = False
    upstream_wait_s: float = 2048.0


@dataclass(frozen=True, slots=True)
class Budget:
    """A sample's use of its time and attempts.

    `tries` counts failed attempts of any kind, for the back-off. `waiting_since_s`: since when no upstream has taken
    it; None when the last attempt was executed, or was the first. `bounded_since_s`: since when every fault has had a
    `wait_s` of its own: a server that is restarted for minutes leaves all of it for its adapters.
    """

    reexecutions: int = 0
    aborts: int = 0
    tries: int = 0
    waiting_since_s: float | None = None
    bounded_since_s: float | None = None


# What every sample begins with.
UNUSED: Final = Budget()


@dataclass(frozen=True, slots=True)
class Wait:
    """Try again after `delay_s`, with `budget` as what is used up then."""

    delay_s: float
    budget: Budget


@dataclass(frozen=True, slots=True)
class Fail:
    failure: Failure


@dataclass(frozen=True, slots=True)
class Orphan:
    """Neither delivered nor failed: the SDK submits the sample again."""


Decision = Wait | Fail | Orphan


def decide(fault: Fault, budget: Budget, policy: Policy, now_s: float, rng_unit: float) -> Decision:
    """Decide what to do about `fault`. `rng_unit` is a random number in [0, 1)."""
    match fault.kind:
        case FaultClass.NEVER_EXECUTED:
            return _wait_or_fail(fault, budget, policy, now_s, rng_unit)
        case FaultClass.INTERRUPTED:
            return _execute_again(fault, budget, policy, rng_unit)
        case FaultClass.ABORTED:
            if budget.aborts >= MAX_ABORTS:
                return Orphan()
            return _wait(fault, replace(budget, aborts=budget.aborts + 1, waiting_since_s=None), rng_unit)
        case FaultClass.AMBIGUOUS if policy.retry_ambiguous and budget.reexecutions < policy.max_reexecutions:
            return _execute_again(fault, budget, policy, rng_unit)
        case FaultClass.WRONG_REPLY if budget.reexecutions < policy.max_reexecutions:
            return _execute_again(fault, budget, policy, rng_unit)
    # What is ambiguous or wrong again and again ends here, too: the SDK would submit an orphan again and again.
    return Fail(Failure(fault.message, fault.category))


def _wait_or_fail(fault: Fault, budget: Budget, policy: Policy, now_s: float, rng_unit: float) -> Decision:
    """Wait if there is time left. Only waiting is charged to the clock, not an execution in between, however long."""
    budget = replace(
        budget,
        waiting_since_s=_first(budget.waiting_since_s, now_s),
        bounded_since_s=_first(budget.bounded_since_s, now_s) if fault.wait_s is not None else None,
    )
    left_s, wait_s = _left(fault, budget, policy, now_s)
    if left_s <= 0:
        return Fail(Failure(f"no upstream took it for {wait_s:g} s; {fault.message}", fault.category))
    decision = _wait(fault, budget, rng_unit)
    # One last try when the time is up, however long the upstream asked to be left alone.
    return replace(decision, delay_s=min(decision.delay_s, left_s))


def _left(fault: Fault, budget: Budget, policy: Policy, now_s: float) -> tuple[float, float]:
    """Return the seconds left of whichever wait ends first, and that wait's full length."""
    waits = [(budget.waiting_since_s, policy.upstream_wait_s), (budget.bounded_since_s, fault.wait_s)]
    return min(
        (since_s + wait_s - now_s, wait_s) for since_s, wait_s in waits if since_s is not None and wait_s is not None
    )


def _first(since_s: float | None, now_s: float) -> float:
    return since_s if since_s is not None else now_s


def _execute_again(fault: Fault, budget: Budget, policy: Policy, rng_unit: float) -> Decision:
    if budget.reexecutions >= policy.max_reexecutions:
        return Orphan()
    return _wait(fault, replace(budget, reexecutions=budget.reexecutions + 1, waiting_since_s=None), rng_unit)


def _wait(fault: Fault, budget: Budget, rng_unit: float) -> Wait:
    """Back off exponentially, with full jitter over the upper half, and never sooner than the upstream asks."""
    longest_s = min(_FIRST_DELAY_S * 2.0 ** min(budget.tries, 16), _LONGEST_DELAY_S)
    delay_s = longest_s * (0.5 + 0.5 * rng_unit)
    if fault.retry_after_s is not None:
        delay_s = fault.retry_after_s + delay_s * rng_unit
    return Wait(delay_s, replace(budget, tries=budget.tries + 1))


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
    """Return whether to ask the store for its limit."""
    return result_bytes > _FITS_ANYWHERE_BYTES


def never_fits(result_bytes: int, limit_bytes: int) -> Failure | None:
    """Explain why a store with `limit_bytes` of memory (0: no limit) never takes such a result; None if it may."""
    if not limit_bytes or result_bytes <= limit_bytes * _LARGEST_SHARE:
        return None
    return Failure(
        f"the result is {_mib(result_bytes)}, which the result store of {_mib(limit_bytes)} cannot keep: ask for fewer"
        " samples, tokens or top-k logprobs at once, or have its memory raised (--redis-memory, maxmemory)",
        Category.SERVER,
    )


def after_refusal(state: State, refusals: int) -> Next:
    """Decide what to do after the store has refused an ending of this kind `refusals` times."""
    if refusals < REFUSALS_MOST:
        return Next.AGAIN
    return Next.FAIL if state is State.READY else Next.GIVE_UP


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
