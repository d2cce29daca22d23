"""Read a long reply of vLLM's `/v1/completions` in parts: the arrays that are needed, and the rest as one document.

Nineteen twentieths of such a reply are five arrays in each choice. Three of them are not needed and are skipped. The
other two are parsed some elements at a time, by one parser whose buffers stay small: one that gets 20 MB at once needs
four times as much memory, fresh from the kernel each time, which costs as much CPU as the parsing itself. The rest is a
small document.

Valid JSON is never read as anything but what it says as a whole:

- A key that is cut behind follows a comma or a brace. Its first quote can then neither be escaped nor end a string, so
  it is a key. A bracket with a key behind it ends an array, for the same reason.
- Pieces that are valid arrays when put between brackets are valid as one array, with the commas that they were cut at.
- A plain value stands in for each array in the document that is left, at the place where the array was.

Invalid JSON within a skipped array goes unnoticed. Everything else that vLLM does not write this way is left to the
reader of whole replies.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from shared.wire import json_arrays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from shared.wire.json_arrays import Body, JsonValue

    Array = NDArray[Any]

# What a parser holds of a piece, several times its length, stays within a processor's cache.
_PIECE_BYTES: Final = 128 * 1024
# This plus an array's number stands where the array was. An integer has one spelling in JSON, so a number in the body
# that looks like one of ours is noticed.
_FIRST_MARK: Final = 7_205_759_403_792_790_000
_MARK_DIGITS: Final = b"720575940379279"
_RECORD_END: Final = b']},"finish_reason":'
_TOP: Final = b'],"top_logprobs":['
# Texts like `token_id:N` hold no bracket, so the array's is the first; other texts may hold many.
_FEW_BRACKETS: Final = 64
_IDS: Final = b',"token_ids":['
_PROMPT: Final = b',"prompt_token_ids":['


class _Span(NamedTuple):
    """A range of an array's elements, without its brackets. `kind` is pysimdjson's; None if nobody needs the array."""

    start: int
    end: int
    kind: Literal["d", "i"] | None


_NUMPY_TYPES: Final = {"d": np.float64, "i": np.int64}
# A comma, last in the match, between two elements. Never the array's last byte: something must follow.
_BETWEEN_NUMBERS: Final = re.compile(rb",(?=[0-9-])")


def load(body: Body, choices: int, piece_bytes: int = _PIECE_BYTES, prompt: bytes = b"") -> JsonValue | None:
    """Load `body` as `json_arrays.load` does, without the values of `text_offset`, `tokens` and `top_logprobs`.

    `prompt` is left out, as by `without_prompt`, unless it is empty. Returns None if there are fewer choices or if
    anything else is unusual, which does not mean that the body is invalid.
    """
    parse = json_arrays.piece_parser()
    if parse is None:
        return None
    try:
        return _load(body, choices, _Reader(body, parse, piece_bytes), prompt)
    except json_arrays.UNREADABLE:
        return None


def without_prompt(body: Body, prompt: bytes) -> Body:
    """Return `body` with null where it repeats the ids of the prompt, which nobody reads.

    `prompt` holds the ids without brackets or blanks, as vLLM writes them. It repeats them in each choice.
    """
    rest: list[bytes | memoryview] = []
    view, kept_to = memoryview(body), 0
    key = body.find(_PROMPT)
    while key >= 0:
        start = key + len(_PROMPT)
        end = start + len(prompt)
        if body.startswith(prompt, start) and body.startswith(b"]", end):
            rest += (view[kept_to : start - 1], b"null")
            kept_to = end + 1
        key = body.find(_PROMPT, max(start, kept_to))
    return b"".join((*rest, view[kept_to:])) if rest else body


def _load(body: Body, choices: int, reader: _Reader, prompt: bytes) -> JsonValue:
    rest: list[bytes | memoryview] = []
    arrays: dict[int, Array] = {}
    at = 0
    for _ in range(choices):
        for span in _spans(body, at):
            array, stand_in = reader.read(span), b"null"
            if array is not None:
                mark = _FIRST_MARK + len(arrays)
                arrays[mark], stand_in = array, b"%d" % mark
            rest += (reader.view[at : span.start - 1], stand_in)
            at = span.end + 1
    small = b"".join((*rest, reader.view[at:]))
    if prompt:
        small = bytes(without_prompt(small, prompt))
    if small.count(_MARK_DIGITS) != len(arrays):
        raise ValueError("something looks like a mark")
    return Assembled(json_arrays.load(small), arrays)


def _spans(body: Body, at: int) -> Iterator[_Span]:
    """Yield the arrays of the next choice after `at`, in vLLM's order. Raises `ValueError` if the order differs."""
    start = _after(body, b'"logprobs":{"text_offset":[', at)
    end = body.index(b"]", start)
    yield _Span(start, end, None)
    start = _behind(body, b'],"token_logprobs":[', end)
    end = body.index(b"]", start)
    yield _Span(start, end, "d")
    start = _behind(body, b'],"tokens":[', end)
    end = _end(body, _TOP, start)
    yield _Span(start, end, None)
    start = _behind(body, _TOP, end)
    end = _end(body, _RECORD_END, start)
    yield _Span(start, end, None)
    start = _after(body, _IDS, end)
    yield _Span(start, body.index(b"]", start), "i")


def _end(body: Body, ending: bytes, start: int) -> int:
    """Find `ending`, which begins with a bracket. Brackets alone are found ten times as fast."""
    for _ in range(_FEW_BRACKETS):
        start = body.index(b"]", start)
        if body.startswith(ending, start):
            return start
        start += 1
    return body.index(ending, start)


def _after(body: Body, key: bytes, at: int) -> int:
    return body.index(key, at) + len(key)


def _behind(body: Body, key: bytes, at: int) -> int:
    if not body.startswith(key, at):
        raise ValueError("another key follows")
    return at + len(key)


class _Reader:
    """Reads the arrays of one body."""

    def __init__(self, body: Body, parse: Callable[[Body], JsonValue], piece_bytes: int) -> None:
        self._body = body
        self._parse = parse
        self._piece_bytes = piece_bytes
        self.view = memoryview(body)

    def read(self, span: _Span) -> Array | None:
        """Return all elements, or None if nobody needs them. Raises one of `UNREADABLE`."""
        if span.kind is None:
            return None
        # A piece ends at the first bracket, so one with a list inside is not valid JSON.
        buffers = (self._parse(piece).as_buffer(of_type=span.kind) for piece in self._pieces(span))
        return np.concatenate([np.frombuffer(buffer, _NUMPY_TYPES[span.kind]) for buffer in buffers])

    def _pieces(self, span: _Span) -> Iterator[bytes]:
        """Yield pieces that are arrays of their own; one empty array for an empty one."""
        start = span.start
        while found := _BETWEEN_NUMBERS.search(self._body, min(start + self._piece_bytes, span.end), span.end):
            yield b"".join((b"[", self.view[start : found.end() - 1], b"]"))
            start = found.end()
        yield b"".join((b"[", self.view[start : span.end], b"]"))


class Assembled:
    """An object or an array of the document, with the arrays in their places."""

    __slots__ = ("_arrays", "_value")

    def __init__(self, value: JsonValue, arrays: Mapping[int, Array]) -> None:
        self._value = value
        self._arrays = arrays

    def __getitem__(self, key: Any) -> JsonValue:
        return self._placed(self._value[key])

    def get(self, key: str) -> JsonValue:
        return self._placed(self._value.get(key))

    def __len__(self) -> int:
        return len(self._value)

    def __iter__(self) -> Iterator[JsonValue]:
        return map(self._placed, self._value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)

    def _placed(self, found: JsonValue) -> JsonValue:
        if type(found) is int:
            return self._arrays.get(found, found)
        return Assembled(found, self._arrays) if json_arrays.is_container(found) else found
