"""Reading a large JSON reply without an object per number.

pysimdjson parses, and hands out arrays of numbers as buffers that are copies of its own, so they outlive the parser.
One parser per body: a parser refuses to parse again while anything of its last document is alive, and keeps its
buffers. Where there is no pysimdjson (no wheel for this Python), orjson does the same at twice to five times the price.
A body is read by one of the two, never by both: they treat duplicate keys differently.

Objects and arrays of either look alike here: `value[key]`, `value.get(key)`, `len(value)`, iteration.
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

Value = Any
# As it was received: a long one was read into its place, and is not copied to become bytes.
Body = bytes | bytearray

# What pysimdjson, orjson and wrong types raise; RuntimeError is pysimdjson's for nesting that is too deep, and
# OverflowError numpy's for an integer beyond 64 bits.
UNREADABLE: Final = (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, OverflowError)


def _load_plain(body: Body) -> Value:
    return orjson.loads(body)


def _load_simdjson(body: Body) -> Value:
    assert simdjson is not None
    return simdjson.Parser().parse(body)


# By name, so that a test can run both.
LOADERS: Final[dict[str, Callable[[Body], Value]]] = {"orjson": _load_plain}
if simdjson is not None:
    LOADERS["simdjson"] = _load_simdjson
load: Final = LOADERS.get("simdjson", _load_plain)


def piece_parser() -> Callable[[Body], Value] | None:
    """For many small documents, one after the other: each must be gone before the next. None without pysimdjson."""
    return simdjson.Parser().parse if simdjson is not None else None


def is_container(value: Value) -> bool:
    """Whether `piece_parser`'s library made an object or an array of it."""
    return simdjson is not None and isinstance(value, simdjson.Object | simdjson.Array)


def integers(array: Value) -> NDArray[np.int64]:
    """int64[len]; a float, even 2.0, and whatever else is not an integer are one of `UNREADABLE`."""
    if isinstance(array, np.ndarray):
        return array.astype(np.int64, casting="safe", copy=False)
    if isinstance(array, list):
        _require(all(type(item) is int for item in array), "not an integer")
        return np.array(array, np.int64)
    return _flat(array, np.frombuffer(array.as_buffer(of_type="i"), np.int64))


def floats(array: Value) -> NDArray[np.float64]:
    """float64[len]; null is one of `UNREADABLE`, never a zero."""
    if isinstance(array, np.ndarray):
        return array.astype(np.float64, casting="safe", copy=False)
    if isinstance(array, list):
        _require(all(type(item) in (int, float) for item in array), "not a number")
        return np.array(array, np.float64)
    return _flat(array, np.frombuffer(array.as_buffer(of_type="d"), np.float64))


def plain(value: Value) -> Any:
    """As Python lists and dicts: for what is small, or asked for seldom."""
    if isinstance(value, list | dict):
        return value
    return value.as_dict() if hasattr(value, "as_dict") else value.as_list()


def _flat(array: Value, numbers: NDArray[Any]) -> NDArray[Any]:
    """pysimdjson's buffers flatten nested arrays, and say nothing."""
    _require(len(array) == len(numbers), "an array within an array")
    _require(not len(numbers) or isinstance(array[0], int | float), "an array within an array")
    return numbers


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise TypeError(otherwise)
