"""Decide whether a worker takes one more sample, by what it holds, what the caller holds of it, and the store's state.

Back-pressure is always retryable (HTTP 429): the SDK slows all its samples down and sends this one again. Only a
request that could never be taken is refused for good (`refuse_request`).

**Shares.** With several keys a worker that is nearly full takes samples only of those who hold less than their share of
it: `limit / (active keys + 1)`. The one more is for a key that has nothing yet: a newcomer finds room, however
many others flood. A worker that is not nearly full is everybody's, so that nothing lies idle.

**Buffers.** Bodies that arrive and replies that are not read yet are held for a client, not for a sample. They have the
same limit, but beside the samples (`admit_buffer`): a key with all its samples in flight must still be able to fetch
results. A sample is admitted by the total.

**A key's own limits** are for the whole gateway. A worker knows only what it holds itself, so each enforces an equal
part, rounded up: the kernel spreads connections evenly over workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shared.core.model import Value

# Nearly full: from here on shares count. The eighth that is left is what a newcomer finds while a single key floods.
_CONTENDED: Final = 7 / 8
# A key with a small limit still has several sampling sessions, and futures of a training server.
_FEW_POLLS: Final = 16


@dataclass(frozen=True, slots=True)
class Limits:
    max_in_flight: int
    max_in_flight_bytes: int


class Load(Value, frozen=True):
    """A worker's load. `in_flight_bytes` counts prompts, results that are not yet in the store, and buffers.

    `buffered_bytes`: the buffers alone.
    """

    in_flight: int
    in_flight_bytes: int
    store_full: bool = False
    draining: bool = False
    store_refilling: bool = False
    buffered_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Tenancy:
    """A key's part of a worker: what it holds, under which limits (each a `worker_part`), and how many keys are active.

    `active_keys`: keys that hold at least one sample, the asking one counted in any case. `shared`: whether more than
    one key could ask at all.
    """

    in_flight: int
    in_flight_bytes: int
    max_in_flight: int | None
    max_in_flight_bytes: int | None
    active_keys: int
    shared: bool
    buffered_bytes: int = 0


# The only key there is, without limits of its own: nothing is asked of what it holds.
ALONE: Final = Tenancy(0, 0, None, None, active_keys=1, shared=False)


@dataclass(frozen=True, slots=True)
class Rejection:
    """`reason` is one word of a bounded set (metrics); `message` is for a person."""

    reason: str
    message: str


def admit(load: Load, limits: Limits, sample_bytes: int, tenancy: Tenancy) -> Rejection | None:
    """Return why a sample of `sample_bytes` is refused, or None if it is accepted.

    One sample is always taken by a worker that holds nothing: a prompt above the byte limit would wait forever. The
    same goes for a key that holds nothing.
    """
    if tenancy is ALONE:
        # `_by_key` and `_by_share` never refuse the only key.
        return _by_state(load) or _by_load(load, limits, sample_bytes)
    return (
        _by_state(load)
        or _by_key(tenancy, sample_bytes)
        or _by_load(load, limits, sample_bytes)
        or _by_share(load, limits, sample_bytes, tenancy)
    )


def admit_buffer(load: Load, limits: Limits, held_bytes: int, more_bytes: int, tenancy: Tenancy) -> Rejection | None:
    """Return why a request or reply that holds `held_bytes` may not hold `more_bytes` beside them, or None if it may.

    One of any size is always taken from a key that buffers nothing else: it would never be delivered otherwise.
    """
    key_bytes = load.buffered_bytes if tenancy is ALONE else tenancy.buffered_bytes
    if key_bytes <= held_bytes:
        return None
    most = tenancy.max_in_flight_bytes
    if most is not None and key_bytes + more_bytes > most:
        text = f"this key's requests and unread replies here would hold more than {most} bytes (max-in-flight-bytes)"
        return Rejection("key", f"{text}; send it again later")
    if load.buffered_bytes + more_bytes > limits.max_in_flight_bytes:
        text = "requests and unread replies hold too many bytes (--max-in-flight-bytes)"
        return Rejection("bytes", f"{text}; send it again later")
    parts = tenancy.active_keys + 1
    if tenancy.shared and _over_share(load.buffered_bytes, key_bytes, more_bytes, limits.max_in_flight_bytes, parts):
        text = f"this key holds more than its share (1/{parts}) of the requests and unread replies on this worker"
        return Rejection("share", f"{text}; send it again later")
    return None


def most_polls(max_in_flight: int) -> int:
    """Return how many polls a key may have held: one for each of its samples, and a fifth more for its sessions."""
    return max(_FEW_POLLS, -(-max_in_flight * 6 // 5))


def refuse_poll(held: int, max_in_flight: int) -> Rejection | None:
    """Return why one more poll of a key is refused, or None if it is held."""
    if held < most_polls(max_in_flight):
        return None
    text = f"{held} polls of this key are held here, as many as its samples need (max-in-flight, and a fifth)"
    return Rejection("key", f"{text}; send it again later")


def worker_part(limit: int | None, workers: int) -> int | None:
    """Return the part that one of `workers` enforces of a key's limit."""
    return None if limit is None else -(-limit // workers)


def refuse_request(num_samples: int, max_tokens: int, max_request_tokens: int | None) -> str | None:
    """Explain why a key may not ask for this much at once, whatever it holds; return None if it may."""
    if max_request_tokens is None or num_samples * max_tokens <= max_request_tokens:
        return None
    asked = f"num_samples x max_tokens is {num_samples} x {max_tokens} = {num_samples * max_tokens}"
    return f"{asked}; this key may ask for at most {max_request_tokens} (max-request-tokens)"


def refuse_session(open_sessions: int, max_sessions: int | None) -> Rejection | None:
    """Return why a key with `open_sessions` live sessions may not open another, or None if it may."""
    if max_sessions is None or open_sessions < max_sessions:
        return None
    text = f"{open_sessions} sessions of this key are open, its limit is {max_sessions} (max-sessions)"
    return Rejection("key", f"{text}; end one, or try again later")


class StoreLoad(Value, frozen=True):
    """The memory of the store, and the results in it that one key has not fetched.

    `max_bytes`: 0 means no limit. `keys`: how many keys have unfetched results, the asking one counted in any case.
    """

    used_bytes: int
    max_bytes: int
    unfetched_bytes: int
    keys: int


def refuse_unfetched(load: StoreLoad) -> Rejection | None:
    """Return why a key may not add to its unfetched results, or None if it may.

    The rule of shares, applied to the store: when it is nearly full, keys that hold more than their share wait.
    """
    parts = load.keys + 1
    if not load.max_bytes or not _over_share(load.used_bytes, load.unfetched_bytes, 1, load.max_bytes, parts):
        return None
    text = f"the result store is nearly full, and this key left more than its share (1/{parts}) of it unfetched"
    return Rejection("share", f"{text}; fetch results, or send it again later")


def _by_state(load: Load) -> Rejection | None:
    if load.draining:
        return Rejection("draining", "this worker is stopping; send it again")
    if load.store_full:
        return Rejection("store_full", "the result store is full; send it again later")
    if load.store_refilling:
        # A submission that is sent again may be running on a worker that has not said so yet.
        return Rejection("store_refilling", "the result store was restarted and is being refilled; send it again")
    return None


def _by_key(tenancy: Tenancy, sample_bytes: int) -> Rejection | None:
    held, most = tenancy.in_flight, tenancy.max_in_flight
    if most is not None and held >= most:
        text = f"{held} samples of this key are in flight here, its limit for this worker is {most} (max-in-flight)"
        return Rejection("key", f"{text}; send it again later")
    most = tenancy.max_in_flight_bytes
    if most is not None and held and tenancy.in_flight_bytes + sample_bytes > most:
        text = f"this key's samples in flight here would hold more than {most} bytes (max-in-flight-bytes)"
        return Rejection("key", f"{text}; send it again later")
    return None


def _by_load(load: Load, limits: Limits, sample_bytes: int) -> Rejection | None:
    if load.in_flight >= limits.max_in_flight:
        return Rejection("in_flight", f"{load.in_flight} samples are in flight (--max-in-flight); send it again later")
    if load.in_flight and load.in_flight_bytes + sample_bytes > limits.max_in_flight_bytes:
        return Rejection("bytes", "too many bytes are in flight (--max-in-flight-bytes); send it again later")
    return None


def _by_share(load: Load, limits: Limits, sample_bytes: int, tenancy: Tenancy) -> Rejection | None:
    if not tenancy.shared or not tenancy.in_flight:
        return None
    parts = tenancy.active_keys + 1
    over = _over_share(load.in_flight, tenancy.in_flight, 1, limits.max_in_flight, parts)
    over_bytes = _over_share(
        load.in_flight_bytes, tenancy.in_flight_bytes, sample_bytes, limits.max_in_flight_bytes, parts
    )
    if not over and not over_bytes:
        return None
    what = "samples" if over else "bytes"
    text = f"this worker is nearly full, and this key holds more than its share (1/{parts}) of the {what} in flight"
    return Rejection("share", f"{text}; send it again later")


def _over_share(held: int, held_by_key: int, more: int, limit: int, parts: int) -> bool:
    return held + more > limit * _CONTENDED and held_by_key + more > limit / parts
