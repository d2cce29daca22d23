"""Read large JSON replies and long lists of token ids without a Python object per number.

pysimdjson parses, and returns arrays of numbers as buffers that are copies of its own, so they outlive the parser. Each
body has its own parser: a parser refuses to parse again while anything of its last document is alive, and keeps its
buffers. Without pysimdjson (there is no wheel for this Python) orjson does the same in two to five times the time. Only
one of the two reads a body: they treat duplicate keys differently.

Objects and arrays of either look alike here: `value[key]`, `value.get(key)`, `len(value)`, iteration.

A list that `count` accepts is valid JSON, flat, and of non-negative integers in their one plain spelling. Only the
upstream knows whether an id is in the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from numpy.typing import NDArray


simdjson: ModuleType | None
try:
    import simdjson
except ImportError:  # CPython without a wheel
    simdjson = None

JsonValue = Any
# A body as it was received. A long one is a bytearray, which is not copied to become bytes.
Body = bytes | bytearray

# What pysimdjson, orjson and wrong types raise; RuntimeError is pysimdjson's for nesting that is too deep, and
# OverflowError numpy's for an integer beyond 64 bits.
UNREADABLE: Final = (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError)


class NestedArray(TypeError):
    """A list stands where a number should."""


def _load_simdjson(body: Body) -> JsonValue:
    assert simdjson is not None
    return simdjson.Parser().parse(body)


# By name, so that a test can run both.
LOADERS: Final[dict[str, Callable[[Body], JsonValue]]] = {"orjson": orjson.loads}
if simdjson is not None:
    LOADERS["simdjson"] = _load_simdjson
load: Final = LOADERS.get("simdjson", orjson.loads)


def piece_parser() -> Callable[[Body], JsonValue] | None:
    """Return a parser for many small documents, each released before the next; None without pysimdjson."""
    return simdjson.Parser().parse if simdjson is not None else None


def is_container(value: JsonValue) -> bool:
    """Return whether the value is an object or an array of `piece_parser`'s library."""
    return simdjson is not None and isinstance(value, simdjson.Object | simdjson.Array)


def integers(array: JsonValue) -> NDArray[np.int64]:
    """Return int64[len]. A float, even 2.0, and whatever else is not an integer raise one of `UNREADABLE`."""
    if isinstance(array, np.ndarray):
        return array.astype(np.int64, casting="safe", copy=False)
    _require_flat(array)
    if isinstance(array, list):
        if not all(type(item) is int for item in array):
            raise TypeError("not an integer")
        return np.array(array, np.int64)
    return np.frombuffer(array.as_buffer(of_type="i"), np.int64)


def floats(array: JsonValue) -> NDArray[np.float64]:
    """Return float64[len]. null raises one of `UNREADABLE`; it is never a zero."""
    if isinstance(array, np.ndarray):
        return array.astype(np.float64, casting="safe", copy=False)
    _require_flat(array)
    if isinstance(array, list):
        if not all(type(item) in (int, float) for item in array):
            raise TypeError("not a number")
        return np.array(array, np.float64)
    return np.frombuffer(array.as_buffer(of_type="d"), np.float64)


def plain(value: JsonValue) -> Any:
    """Convert to Python lists and dicts, for what is small or rarely needed."""
    if isinstance(value, list | dict):
        return value
    return value.as_dict() if hasattr(value, "as_dict") else value.as_list()


def _require_flat(array: JsonValue) -> None:
    """Raise `NestedArray` for a list within `array`: pysimdjson's buffers flatten it in silence."""
    if list in set(map(type, plain(array))):
        raise NestedArray("an array within an array")


# Map digits to 0, a comma to itself and everything else to x: one pass in C shows the shape of a list.
_SHAPE: Final = bytes(0x30 if code in b"0123456789" else 0x2C if code == 0x2C else 0x78 for code in range(256))
# A number of ten digits may be above 2**31 - 1, and no vocabulary is that large. The exact bound costs more to check.
_TEN_DIGITS: Final = b"0" * 10
# From this length on, numpy's dozen calls cost less than a search for each byte that is not allowed.
_LONG_BYTES: Final = 4096
_COMMA: Final = 0x2C
# The characters between a comma and the digits in ASCII.
_BETWEEN: Final = (b"-", b".", b"/")
_ZERO: Final = 0x30
_NINE: Final = 0x39


def count(inside: bytes) -> int | None:
    """Count the ids in `inside` (`b"1,2,3"`, without brackets); None if it is not a plain list of one or more."""
    return _count_long(inside) if len(inside) >= _LONG_BYTES else _count_short(inside)


def _count_short(inside: bytes) -> int | None:
    shape = inside.translate(_SHAPE)
    if b"x" in shape or _TEN_DIGITS in shape:
        return None
    # An extra comma and a leading zero are invalid JSON; the parser finds them faster than two searches would.
    try:
        return len(load(b"[%b]" % inside)) or None
    except UNREADABLE:
        return None


def _count_long(inside: bytes) -> int | None:
    codes = np.frombuffer(inside, np.uint8)
    if codes.max() > _NINE or codes.min() < _COMMA or any(other in inside for other in _BETWEEN):
        return None
    commas = codes == _COMMA
    if commas[0] or commas[-1] or _some_wrong_start(codes, commas) or _some_run_of_ten(commas):
        return None
    return int(np.count_nonzero(commas)) + 1


def _some_wrong_start(codes: NDArray[np.uint8], commas: NDArray[np.bool_]) -> bool:
    """Return whether a number is empty or has a leading zero; neither end is a comma."""
    starts = codes[1:] <= _ZERO
    starts &= commas[:-1]
    suspects = np.flatnonzero(starts) + 1
    if codes[0] == _ZERO and not commas[1]:
        return True
    # If the last byte is a suspect, it is a zero that stands alone. Each other suspect must be a zero before a comma.
    suspects = suspects[suspects < len(codes) - 1]
    return bool((commas[suspects] | ~commas[suspects + 1]).any())


def _some_run_of_ten(commas: NDArray[np.bool_]) -> bool:
    # Wherever it begins, a run of ten holds four neighbouring pairs, each of bytes 2k and 2k + 1.
    twos = commas[: len(commas) // 2 * 2].view(np.uint16) == 0
    fours = twos[1:] & twos[:-1]
    if not (fours[2:] & fours[:-2]).any():
        return False
    digits = ~commas
    twos = digits[1:] & digits[:-1]
    fours = twos[2:] & twos[:-2]
    eights = fours[4:] & fours[:-4]
    return bool((eights[2:] & twos[:-8]).any())
