"""The reply that nearly every sample gets of `/v1/completions`: whole choices, in order, with ids and logprobs only.

It is read with few calls: each of numpy's costs a microsecond, as much as parsing a sixth of a small reply. Anything
unusual yields None, and the decoder of all replies (`reply.py`) reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from shared.core.result import SequenceResult, StopReason
from shared.wire import json_arrays

if TYPE_CHECKING:
    from shared.wire.json_arrays import Body, JsonValue

STOP_REASONS: Final = {
    "stop": StopReason.STOP,
    "length": StopReason.LENGTH,
    # vLLM's own detector of endless repetition ended it: it will not go on.
    "repetition": StopReason.STOP,
}
_LOGPROBS_KEY: Final = b'"token_logprobs":['
_IDS_KEY: Final = b'"token_ids":['
_INT32: Final = np.dtype("<i4")
_FLOAT32: Final = np.dtype("<f4")
_FLOAT64: Final = np.dtype("<f8")
# The first bytes, which hold the sign and seven bits of the exponent, of zero and of negative doubles above -2**113,
# well within the range of 32 bits. What is above zero, if only by rounding, is left to the decoder of all replies.
_LOGPROBS: Final = bytes([0, *range(0x80, 0x80 + 0x47)])


# All replies share one parser: its buffers are small, in the cache, and free again when a reply has been read.
_parse: Final = json_arrays.piece_parser()


def load(body: Body) -> JsonValue | None:
    """Load a reply that is released before the next one; None if it is not JSON or there is no pysimdjson."""
    try:
        return _parse(body) if _parse is not None else None
    except json_arrays.UNREADABLE:
        return None


def sequences(reply: JsonValue, body: Body, wanted: int, max_tokens: int) -> tuple[SequenceResult, ...] | None:
    """Return the sequences of `reply`, which was loaded from `body`, or None when anything about it is unusual."""
    if not _are_flat(body, wanted):
        return None
    try:
        # Looking up an absent key costs five times as much as listing the keys.
        if "error" in list(reply):
            return None
        choices = reply["choices"]
        if len(choices) != wanted:
            return None
        found = [_sequence(choices[index], index, max_tokens) for index in range(wanted)]
    except json_arrays.UNREADABLE:
        return None
    return tuple(found)


def _are_flat(body: Body, wanted: int) -> bool:
    """Return whether each choice has its two arrays in vLLM's spelling, with no list inside.

    pysimdjson's buffers flatten nested lists in silence. The keys cannot be text, where their quotes would be escaped.
    Of one choice the logprobs are near the start and the ids near the end: next to nothing is searched.
    """
    start, end = 0, len(body)
    for _ in range(wanted):
        start, end = body.find(_LOGPROBS_KEY, start), body.rfind(_IDS_KEY, 0, end)
        if start < 0 or end < 0:
            return False
        start += len(_LOGPROBS_KEY)
        ids = end + len(_IDS_KEY)
        if body.find(b"[", start, body.find(b"]", start)) >= 0 or body.find(b"[", ids, body.find(b"]", ids)) >= 0:
            return False
    return True


def _sequence(choice: JsonValue, index: int, max_tokens: int) -> SequenceResult:
    """Return one choice as a sequence. Raises one of `UNREADABLE`."""
    logprobs, tokens = choice["logprobs"]["token_logprobs"], choice["token_ids"]
    reason = STOP_REASONS[choice["finish_reason"]]
    count = len(tokens)
    if choice["index"] != index or len(logprobs) != count or count > max_tokens:
        raise ValueError
    return SequenceResult(_token_ids(tokens, count), _logprobs(logprobs, count), reason)


def _token_ids(array: JsonValue, count: int) -> bytes:
    """Return int32 bytes of 64-bit integers whose upper halves are zero and whose lower ones are positive."""
    halves = np.frombuffer(array.as_buffer(of_type="i"), _INT32)
    ids, upper = halves[::2].tobytes(), halves[1::2].tobytes()
    # Every fourth byte holds a sign.
    if len(ids) != 4 * count or upper != bytes(4 * count) or not ids[3::4].isascii():
        raise OverflowError
    return ids


def _logprobs(array: JsonValue, count: int) -> bytes:
    """Return float32 bytes."""
    buffer = array.as_buffer(of_type="d")
    raw = bytes(buffer)
    if len(raw) != 8 * count or raw[7::8].translate(None, _LOGPROBS):
        raise OverflowError
    return np.frombuffer(buffer, _FLOAT64).astype(_FLOAT32).tobytes()
