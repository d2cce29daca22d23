"""The stored form of a sample: a fixed header, then the payload.

    offset  bytes  field
    0       1      state, the value of `lifecycle.State`
    1       1      settled: the clock, "-" undelivered, "r" a reply was handed over, "a" also
                   acknowledged, "A" acknowledged and not yet counted as handed over;
                   PENDING: "-", or "p" while no upstream takes the sample
    2       2      attempt that owns the sample, big-endian
    4       4      n, the number of sequences promised, big-endian
    8       16     digest of the request
    24      16     owner, the worker instance (ASCII)
    40      ...    payload: the encoded SampleResponse (READY, RETRIEVED), JSON `{"error", "category"}` (FAILED,
                   CANCELLED), nothing otherwise

The state comes first, so that one byte answers "is it done?". Every record keeps digest, n, owner and attempt, so that
a duplicate submission gets the same promise as the first one, whatever became of the sample.
"""

from __future__ import annotations

import struct
from typing import Final

from shared.core.errors import StoreRefused
from shared.core.lifecycle import State
from shared.core.model import Value

_HEADER: Final = struct.Struct(">1s1sHI16s16s")
HEADER_BYTES: Final = _HEADER.size
DIGEST_BYTES: Final = 16
UNDELIVERED: Final = b"-"
HANDED_OVER: Final = b"r"
ACKNOWLEDGED: Final = b"a"
# The acknowledgement came first: another worker is still counting the hand-over that it confirms.
ACKNOWLEDGED_FIRST: Final = b"A"
PAUSED: Final = b"p"
# Used twice for every sample: reading an Enum member's value, or finding the member by it, takes longer than the rest.
_FIRST_BYTES: Final = {state.value: state.value.encode() for state in State}
_STATES: Final = {state.value.encode(): state for state in State if state is not State.GONE}
_STARTED: Final = (HANDED_OVER, ACKNOWLEDGED, ACKNOWLEDGED_FIRST)


class Claim(Value, frozen=True):
    """Name the owner of a sample and the request. `owner` is 16 ASCII characters, one value per worker instance."""

    owner: str
    attempt: int
    n: int
    digest: bytes


class Header(Value, frozen=True):
    """Everything of a stored sample except its payload."""

    state: State
    claim: Claim
    handed_over: bool = False
    paused: bool = False


class Record(Value, frozen=True):
    """A stored sample. `payload` is a view, not a copy."""

    header: Header
    payload: memoryview


class BadRecord(StoreRefused):
    """Report a stored value that no version of this gateway wrote."""


def pack(state: State, claim: Claim, payload: bytes = b"") -> bytes:
    """Return header and payload as they are stored, with the clock at undelivered."""
    first = _FIRST_BYTES[state._value_]
    return _HEADER.pack(first, UNDELIVERED, claim.attempt, claim.n, claim.digest, claim.owner.encode()) + payload


def unpack_header(data: bytes | memoryview) -> Header:
    """Return the header of a stored value. Raises `BadRecord` if it is too short or its state is unknown."""
    try:
        state, clock, attempt, n, digest, owner = _HEADER.unpack_from(data)
        claim = Claim(owner.decode(), attempt, n, digest)
        return Header(_STATES[state], claim, clock in _STARTED, clock == PAUSED)
    except (struct.error, ValueError, KeyError) as error:
        # The bytes are not repeated: they may be those of a prompt or a result.
        raise BadRecord(f"not a sample record: {len(data)} bytes") from error


def unpack(data: bytes) -> Record:
    """Return header and payload of a stored value. Raises `BadRecord`."""
    return Record(unpack_header(data), memoryview(data)[HEADER_BYTES:])
