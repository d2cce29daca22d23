"""Read a client's JSON strictly, with work that is bounded before it is done.

What is not plainly valid is refused with one sentence, never guessed at. msgspec checks syntax, types and depth,
refuses NaN and Infinity, and keeps integers integers. It accepts two things that are refused here: text that is not
UTF-8 in fields that nobody reads, and a key that is given twice, of which it takes the last while other readers take
the first.

A body of many MiB is read in steps: generators yield between pieces of a few milliseconds, so that the event loop can
turn. A piece of an array that is valid JSON between brackets on its own proves that the array is valid when all its
pieces are, and one plain value that stands in for the array proves the same for the rest of the body.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgspec

from shared.core.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from msgspec.json import Decoder

T = TypeVar("T")
# A computation that yields between its pieces and returns its result.
Steps: TypeAlias = Generator[None, None, T]

# The most values in a body, besides a prompt and acknowledgements, which are taken out first. Clients send far fewer.
MAX_VALUES: Final = 10_000
# The most of a body that one call of a parser is given, prompts apart: a few milliseconds of CPU.
MAX_REST_BYTES: Final = 2**20
# What one step reads of an array: some 1,500 prompt chunks.
_PIECE_BYTES: Final = 64 * 1024
# How often to look for the end of an element that is longer than a piece: no valid one has as many inner brackets.
_TRIES: Final = 64
_SHOWN_CHARS: Final = 40
# White space as an expression. Where there is more than any client writes, a body is read as an unusual one.
BLANKS: Final = rb"[ \t\r\n]{0,200}"


def at_once(steps: Steps[T]) -> T:
    """Run all steps without a pause and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result


def require_short(rest_bytes: int) -> None:
    """Raise `BadRequest` if what is left of a body is longer than any client's."""
    if rest_bytes > MAX_REST_BYTES:
        raise BadRequest(f"the request holds more than {MAX_REST_BYTES} bytes besides its tokens and images")


def decode(decoder: Decoder[T], body: bytes, what: str) -> T:
    """Decode `body`, which is short but for what was taken out. Raises `BadRequest` that says what is wrong."""
    require_short(len(body))
    # Each value is written with one of three characters: a short body cannot hold too many.
    if len(body) > MAX_VALUES and sum(map(body.count, (b",", b"{", b"["))) > MAX_VALUES:
        raise BadRequest(
            f"the request is not a valid {what}: it holds more than {MAX_VALUES} values besides its tokens"
        )
    return parse(decoder, body, what)


def parse(decoder: Decoder[T], body: bytes, what: str) -> T:
    """Decode `body`, whose length was bounded. Raises `BadRequest` that says why it is not a valid `what`."""
    try:
        text = body.decode()
        value = decoder.decode(body)
        _keys.raw_decode(text.lstrip())
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadRequest(f"the request is not a valid {what}: {error}") from None
    return value


def _refuse_repeated_key(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1 and len(dict(pairs)) < len(pairs):
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {key[:_SHOWN_CHARS]!r} is given twice")


def _refuse_infinite(number: str) -> None:
    # msgspec does not look at the size of a number that nobody reads.
    if math.isinf(float(number)):
        raise ValueError("a number is out of range")


# The standard library's parser is the one that shows all keys of an object.
_keys: Final = json.JSONDecoder(object_pairs_hook=_refuse_repeated_key, parse_float=_refuse_infinite)


class Boundary:
    """Bytes between two elements of an array that begin with `opening` and end with `closing`, or behind the last."""

    def __init__(self, opening: bytes, closing: bytes) -> None:
        self.closing = closing
        # Group 1 is the bracket that ends the array.
        self.pattern: Final = re.compile(
            rb"%b%b(?:,%b(?=%b)|(\]))" % (re.escape(closing), BLANKS, BLANKS, re.escape(opening))
        )


def array_pieces(
    body: bytes, start: int, boundary: Boundary, piece_bytes: int = _PIECE_BYTES
) -> Iterator[tuple[bytes, int]]:
    """Yield the elements of an array in pieces, each with the position of what follows it: at last, of the bracket.

    `start` is the position behind the opening bracket. A boundary may also match within an element; the pieces beside
    it are then not valid JSON. Raises `BadRequest` if no boundary is found where one must be.
    """
    while True:
        last = None
        for last in boundary.pattern.finditer(body, start, start + piece_bytes):
            if last[1]:
                break
        if last is None:
            last = _boundary_of_long_element(body, start, boundary, piece_bytes)
        end = last.start() + len(boundary.closing)
        yield body[start:end], last.start(1) if last[1] else last.end()
        if last[1]:
            return
        start = last.end()


def _boundary_of_long_element(body: bytes, start: int, boundary: Boundary, piece_bytes: int) -> re.Match[bytes]:
    # Looking for its first byte is many times faster than searching for the pattern.
    at = max(start, body.rfind(boundary.closing, start, start + piece_bytes))
    for _ in range(_TRIES):
        at = body.find(boundary.closing, at)
        if at < 0:
            break
        found = boundary.pattern.match(body, at)
        if found is not None:
            return found
        at += 1
    raise BadRequest("the request is not valid JSON, or a long list in it is written in an unusual way")
