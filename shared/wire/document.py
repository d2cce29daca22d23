"""Reading a large JSON reply without an object per number.

pysimdjson parses, and hands out arrays of numbers as buffers that are copies of its own, so they outlive the parser. One
parser per body: a parser refuses to parse again while anything of its last document is alive, and keeps its buffers.
Where there is no pysimdjson (no wheel for this Python), orjson does the same at twice to five times the price. A body
is read by one of the two, never by both: they treat duplicate keys differently.

Objects and arrays of either look alike here: `value[key]`, `len(value)`, iteration. A key that is missing reads as an
error, an array element that is not a number too; all such errors are in `UNREADABLE`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

if TYPE_CHECKING:
    from numpy.typing import NDArray

try:
    import simdjson
except ImportError:  # pragma: no cover - CPython without a wheel
    simdjson = None

Value = Any

# What pysimdjson, orjson and wrong types raise; RuntimeError is pysimdjson's for nesting that is too deep.
UNREADABLE: Final = (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError)


def load(body: bytes) -> Value:
    """The document in `body`. Raises one of `UNREADABLE`."""
    return simdjson.Parser().parse(body) if simdjson is not None else orjson.loads(body)


def integers(array: Value) -> NDArray[np.int64]:
    """int64[len]; a float, even 2.0, and whatever else is not an integer are errors."""
    if isinstance(array, list):
        if not all(type(item) is int for item in array):
            raise TypeError("not an integer")
        return np.array(array, np.int64)
    return np.frombuffer(array.as_buffer(of_type="i"), np.int64)


def floats(array: Value) -> NDArray[np.float64]:
    """float64[len]; null is an error, never a zero."""
    if isinstance(array, list):
        if not all(type(item) in (int, float) for item in array):
            raise TypeError("not a number")
        return np.array(array, np.float64)
    return np.frombuffer(array.as_buffer(of_type="d"), np.float64)


def plain(value: Value) -> Any:
    """As Python lists and dicts: for what is small, or asked for seldom."""
    if isinstance(value, list | dict):
        return value
    return value.as_dict() if hasattr(value, "as_dict") else value.as_list()
