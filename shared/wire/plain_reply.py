"""The reply that nearly every sample gets of `/v1/completions`: whole choices, in order, with ids and logprobs only.

Read with few calls: numpy's cost a microsecond each, as much as parsing a sixth of a small reply. Only what is right is
told; of everything else nothing is said, and who reads all replies (`vllm_reply.py`) has to look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from shared.core.result import SequenceResult, StopReason
from shared.wire import document

if TYPE_CHECKING:
    from shared.wire.document import Body, Value

STOP_REASONS: Final = {
    "stop": StopReason.STOP,
    "length": StopReason.LENGTH,
    # vLLM's own detector of endless repetition ended it: it will not go on.
    "repetition": StopReason.STOP,
}
_NUMBERS: Final = (int, float)
_INT32: Final = np.dtype("<i4")
_FLOAT32: Final = np.dtype("<f4")
_FLOAT64: Final = np.dtype("<f8")
# The first bytes of doubles below 2**113, well within 32 bits' range: sign, and seven bits of the exponent.
_SMALL: Final = bytes(byte for byte in range(256) if byte & 0x7F < 0x47)


# One for all: its buffers are small, warm, and free again when a reply has been read.
_parse: Final = document.piece_parser()


def load(body: Body) -> Value | None:
    """None where it is no JSON, or there is no pysimdjson. To be let go before the next one is loaded."""
    try:
        return _parse(body) if _parse is not None else None
    except document.UNREADABLE:
        return None


def sequences(reply: Value, wanted: int) -> tuple[SequenceResult, ...] | None:
    """Those of `reply`. None when there is anything unusual about it."""
    try:
        # To look up a key that is not there costs five times as much as to list those that are.
        if "error" in list(reply):
            return None
        choices = reply["choices"]
        if len(choices) != wanted:
            return None
        found = [_sequence(choices[index], index) for index in range(wanted)]
    except document.UNREADABLE:
        return None
    return tuple(found)


def _sequence(choice: Value, index: int) -> SequenceResult:
    """Raises one of `UNREADABLE`."""
    logprobs, tokens = choice["logprobs"]["token_logprobs"], choice["token_ids"]
    reason = STOP_REASONS[choice["finish_reason"]]
    if choice["index"] != index or len(tokens) != len(logprobs):
        raise ValueError
    return SequenceResult(_token_ids(tokens), _logprobs(logprobs), reason)


def _token_ids(told: Value) -> bytes:
    """int32, of an array of 64-bit integers of which the upper halves are zero, and the lower ones no less."""
    halves = np.frombuffer(_buffer(told, "i"), _INT32)
    ids, upper = halves[::2].tobytes(), halves[1::2].tobytes()
    # Every fourth byte holds a sign.
    if upper != bytes(len(upper)) or not ids[3::4].isascii():
        raise OverflowError
    return ids


def _logprobs(told: Value) -> bytes:
    """float32"""
    buffer = _buffer(told, "d")
    if bytes(buffer)[7::8].translate(None, _SMALL):
        raise OverflowError
    return np.frombuffer(buffer, _FLOAT64).astype(_FLOAT32).tobytes()


def _buffer(array: Value, kind: str) -> memoryview:
    """As `document.integers` and `document.floats` read one: what is flat."""
    buffer = memoryview(array.as_buffer(of_type=kind))
    items = len(array)
    if len(buffer) != 8 * items or (items and type(array[0]) not in _NUMBERS):
        raise TypeError
    return buffer
