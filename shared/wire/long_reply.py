"""A long reply of vLLM's `/v1/completions`, read in parts: its long arrays piece by piece, the rest as one document.

A parser that is given 20 MB at once wants four times as much memory, fresh from the kernel each time, and that costs as
much CPU as the parsing itself. Nineteen twentieths of such a reply are five arrays in each choice. Here their elements
are parsed some at a time, by one parser whose buffers stay small, and what is left is a small document.

Nothing is taken for a reply that would not be taken for one as a whole, and nothing for another one:

- A key that is cut behind follows a comma or a brace. In valid JSON its first quote can then neither be escaped nor end
  a string, so it is a key; and the document, with a plain value where the array was, is parsed, so it is valid JSON.
- Pieces that are valid arrays when put between brackets are valid as one array, with the commas that they were cut at.
- Where an array ends is a guess by what vLLM writes after it. After a wrong guess one of the two does not hold.

Whatever is not as vLLM writes it is left to who reads the whole.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shared.wire import document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from shared.wire.document import Body, Value

    Array = NDArray[Any]

# What a parser holds of a piece, several times its length, stays within a processor's cache.
_PIECE_BYTES: Final = 128 * 1024
# Stands where an array was; told by its spelling, which is nowhere else in the document.
_MARK: Final = b'"\\u0000array %d"'
_MARK_START: Final = b'"\\u0000array '
_MARKED: Final = "\0array {}"
_RECORD_END: Final = b']},"finish_reason":'
_IDS: Final = b',"token_ids":['
_PROMPT: Final = b',"prompt_token_ids":['


class _Span(NamedTuple):
    """The elements of an array, without its brackets. `read` is None for what nobody asks for."""

    start: int
    end: int
    cut: re.Pattern[bytes]
    read: Callable[[Value], Array] | None


# A comma, last in the match, between two elements. Never the array's last byte: something must follow.
_BETWEEN_NUMBERS: Final = re.compile(rb",(?=[0-9-])")
_BETWEEN_TEXTS: Final = re.compile(rb'[^\\]",(?=")')
_BETWEEN_ROWS: Final = re.compile(rb'[0-9]\},(?=\{")')


def load(body: Body, choices: int, piece_bytes: int = _PIECE_BYTES) -> Value | None:
    """What `document.load` makes of `body`, without the values of `text_offset`, `tokens` and `top_logprobs`.

    None when there are not as many choices, or anything else is unusual; that says nothing about the body.
    """
    parse = document.piece_parser()
    if parse is None:
        return None
    try:
        return _load(body, choices, _Reader(body, parse, piece_bytes))
    except document.UNREADABLE:
        return None


def without_prompt(body: Body, prompt: bytes) -> Body:
    """`body` with null where it repeats the prompt's ids, which nobody reads; equal to it save for that.

    `prompt`: ids as `token_list` takes them, and as vLLM writes them. It repeats them in each choice.
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


def _load(body: Body, choices: int, reader: _Reader) -> Value:
    rest: list[bytes | memoryview] = []
    arrays: dict[str, Array] = {}
    at = 0
    for choice in range(choices):
        for span in _spans(body, at, is_last=choice == choices - 1):
            array, stand_in = reader.read(span), b"null"
            if array is not None:
                stand_in = _MARK % len(arrays)
                arrays[_MARKED.format(len(arrays))] = array
            rest += (reader.view[at : span.start - 1], stand_in)
            at = span.end + 1
    small = b"".join((*rest, reader.view[at:]))
    if small.count(_MARK_START) != len(arrays):
        raise ValueError("a text looks like a mark")
    return Assembled(document.load(small), arrays)


def _spans(body: Body, at: int, *, is_last: bool) -> Iterator[_Span]:
    """Of the next choice after `at`, in vLLM's order. Raises `ValueError` when it has another one."""
    start = _after(body, b'"logprobs":{"text_offset":[', at)
    end = body.index(b"]", start)
    yield _Span(start, end, _BETWEEN_NUMBERS, None)
    start = _behind(body, b'],"token_logprobs":[', end)
    end = body.index(b"]", start)
    yield _Span(start, end, _BETWEEN_NUMBERS, document.floats)
    start = _behind(body, b'],"tokens":[', end)
    end = body.index(b'],"top_logprobs":[', start)
    yield _Span(start, end, _BETWEEN_TEXTS, None)
    start = _behind(body, b'],"top_logprobs":[', end)
    # From the end it is near, and between two choices it is the first.
    end = body.rindex(_RECORD_END, start) if is_last else body.index(_RECORD_END, start)
    yield _Span(start, end, _BETWEEN_ROWS, None)
    start = _after(body, _IDS, end)
    yield _Span(start, body.index(b"]", start), _BETWEEN_NUMBERS, document.integers)


def _after(body: Body, key: bytes, at: int) -> int:
    return body.index(key, at) + len(key)


def _behind(body: Body, key: bytes, at: int) -> int:
    if not body.startswith(key, at):
        raise ValueError("another key follows")
    return at + len(key)


class _Reader:
    """Of the arrays of one body."""

    def __init__(self, body: Body, parse: Callable[[Body], Value], piece_bytes: int) -> None:
        self._body = body
        self._parse = parse
        self._piece_bytes = piece_bytes
        self.view = memoryview(body)

    def read(self, span: _Span) -> Array | None:
        """All elements, or None when they are valid and nobody asks for them. Raises one of `UNREADABLE`."""
        if span.read is None:
            for piece in self._pieces(span):
                self._parse(piece)
            return None
        return np.concatenate([span.read(self._parse(piece)) for piece in self._pieces(span)])

    def _pieces(self, span: _Span) -> Iterator[bytes]:
        """As arrays of their own; an empty one of an empty array."""
        start = span.start
        while found := span.cut.search(self._body, min(start + self._piece_bytes, span.end), span.end):
            yield b"".join((b"[", self.view[start : found.end() - 1], b"]"))
            start = found.end()
        yield b"".join((b"[", self.view[start : span.end], b"]"))


class Assembled:
    """An object or an array of the document, with the arrays in their places."""

    __slots__ = ("_arrays", "_value")

    def __init__(self, value: Value, arrays: Mapping[str, Array]) -> None:
        self._value = value
        self._arrays = arrays

    def __getitem__(self, key: Any) -> Value:
        return self._placed(self._value[key])

    def get(self, key: str) -> Value:
        return self._placed(self._value.get(key))

    def __len__(self) -> int:
        return len(self._value)

    def __iter__(self) -> Iterator[Value]:
        return map(self._placed, self._value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)

    def _placed(self, found: Value) -> Value:
        if isinstance(found, str):
            return self._arrays.get(found, found)
        return Assembled(found, self._arrays) if document.is_container(found) else found
