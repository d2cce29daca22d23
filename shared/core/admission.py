"""Whether a worker takes one more sample, decided from three signals: number, bytes, and the state of the store.

Back-pressure is always retryable (HTTP 429): the SDK slows all its samples down and sends this one again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    max_in_flight: int
    max_in_flight_bytes: int


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker holds now. `in_flight_bytes` counts prompts, and results that are not yet in the store."""

    in_flight: int
    in_flight_bytes: int
    store_full: bool = False
    draining: bool = False
    store_refilling: bool = False


@dataclass(frozen=True, slots=True)
class Rejection:
    """`reason` is one word of a bounded set (metrics); `message` is for a person."""

    reason: str
    message: str


def admit(load: Load, limits: Limits, sample_bytes: int) -> Rejection | None:
    """None when a sample of `sample_bytes` may be taken, else why not.

    One sample is always taken by a worker that holds nothing: a prompt above the byte limit would wait for ever.
    """
    if load.draining:
        return Rejection("draining", "this worker is stopping; send it again")
    if load.store_full:
        return Rejection("store_full", "the result store is full; send it again later")
    if load.store_refilling:
        # A submission that is sent again may be running on a worker that has not said so yet.
        return Rejection("store_refilling", "the result store was restarted and is being refilled; send it again")
    if load.in_flight >= limits.max_in_flight:
        return Rejection("in_flight", f"{load.in_flight} samples are in flight (--max-in-flight); send it again later")
    if load.in_flight and load.in_flight_bytes + sample_bytes > limits.max_in_flight_bytes:
        return Rejection("bytes", "too many bytes are in flight (--max-in-flight-bytes); send it again later")
    return None
