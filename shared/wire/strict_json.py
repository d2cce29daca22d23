"""JSON as a careful server reads it: what is not plainly valid is one sentence for the caller, never a guess.

msgspec checks syntax, types and depth, refuses NaN and Infinity, and keeps integers integers. Two things it passes
over: text that is not UTF-8 in fields that nobody asked for, and a key that is given twice, of which it takes the last
while other readers of the same bytes take the first. Both are refused here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec

from shared.core.errors import BadRequest
from shared.wire import json_arrays

if TYPE_CHECKING:
    from collections.abc import Iterator

    from msgspec.json import Decoder

T = TypeVar("T")

_SHOWN_CHARS: Final = 40
_TOKENS: Final = b'"tokens"'
_LIST_AHEAD: Final = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*\[")
# Besides token lists. Far above what a client sends (an acknowledgement each for all it has in flight); reading as many
# takes some 0.1 s and 20 MB, and without a bound the largest body would hold the worker up for half a minute.
MAX_VALUES: Final = 200_000
_STRUCTURE: Final = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?|([{}])', re.DOTALL)


class Lifted(NamedTuple):
    """A body whose token lists were taken out. In `skeleton` each has its place in `lists` instead: `"tokens":[1]`.

    `lists`: the inside of each (`b"1,2,3"`), and how many ids it has.
    """

    skeleton: bytes
    lists: list[tuple[bytes, int]]


def lift(body: bytes) -> Lifted | None:
    """Take the token lists out, so that nothing has to read them again; None where one of them is not plain."""
    parts: list[bytes] = []
    lists: list[tuple[bytes, int]] = []
    kept_to = 0
    for first, last in _flat_lists(body):
        inside = body[first:last]
        if b" " in inside:
            # As Python's json writes it; a blank anywhere else is left in, and refused.
            inside = inside.replace(b", ", b",")
        ids = json_arrays.count(inside)
        if ids is None:
            return None
        parts += (body[kept_to:first], b"%d" % len(lists))
        lists.append((inside, ids))
        kept_to = last
    parts.append(body[kept_to:])
    skeleton = b"".join(parts)
    # What is still a list must not be taken for a place: one with a string in it, or under a key spelled with escapes.
    if skeleton.count(_TOKENS) != len(lists) or b"\\u" in skeleton:
        return None
    return Lifted(skeleton, lists)


def decode(decoder: Decoder[T], body: bytes, what: str) -> T:
    """`body` by `decoder`. Raises `BadRequest` that says it is not a valid `what`."""
    return _decode(decoder, body, _without_tokens(body), what)


def decode_lifted(decoder: Decoder[T], lifted: Lifted, what: str) -> T:
    """As `decode` of the body that was lifted, whose lists are known to be well-formed."""
    return _decode(decoder, lifted.skeleton, lifted.skeleton, what)


def _decode(decoder: Decoder[T], body: bytes, skeleton: bytes, what: str) -> T:
    try:
        if not body.isascii():
            body.decode()
        _bound_values(skeleton)
        value = decoder.decode(body)
        key = repeated_key(skeleton)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadRequest(f"the request is not a valid {what}: {error}") from None
    if key is not None:
        raise BadRequest(f"the request is not a valid {what}: the key {key[:_SHOWN_CHARS]!r} is given twice")
    return value


def _bound_values(skeleton: bytes) -> None:
    # Each of them is written with one of three characters: a short body cannot hold too many.
    if len(skeleton) > MAX_VALUES and sum(map(skeleton.count, (b",", b"{", b"["))) > MAX_VALUES:
        raise BadRequest(f"the request holds more than {MAX_VALUES} values besides its tokens")


def repeated_key(skeleton: bytes) -> str | None:
    """A key that some object of `skeleton`, which must be valid JSON, holds twice.

    Every key is written with one colon, so no more colons than keys that were kept means that none was dropped. That
    settles nearly every body; where a string has a colon too, the keys are looked at one by one.
    """
    if skeleton.count(b":") == _keys_kept(msgspec.json.decode(skeleton)):
        return None
    return _first_repeated(skeleton)


def _keys_kept(value: Any) -> int:
    kept, ahead = 0, [value]
    while ahead:
        item = ahead.pop()
        if type(item) is dict:
            kept += len(item)
            ahead.extend(item.values())
        elif type(item) is list:
            ahead.extend(item)
    return kept


def _first_repeated(body: bytes) -> str | None:
    open_objects: list[set[bytes]] = []
    for text, colon, brace in _STRUCTURE.findall(body):
        if colon:
            key = _unescaped(text)
            if key in open_objects[-1]:
                return key.decode()
            open_objects[-1].add(key)
        elif brace == b"{":
            open_objects.append(set())
        elif brace:
            open_objects.pop()
    return None


def _without_tokens(body: bytes) -> bytes:
    """`body` with its token lists emptied: by far its longest part, and free of keys."""
    parts, kept_to = [], 0
    for first, last in _flat_lists(body):
        parts.append(body[kept_to:first])
        kept_to = last
    parts.append(body[kept_to:])
    return b"".join(parts)


def _flat_lists(body: bytes) -> Iterator[tuple[int, int]]:
    """Where the inside of each list of tokens begins and ends; those with strings or lists in them are left out."""
    at = body.find(_TOKENS)
    while at >= 0:
        at += len(_TOKENS)
        ahead = _LIST_AHEAD.match(body, at)
        last = _end_of_flat(body, ahead.end()) if ahead else -1
        if ahead and last >= 0:
            yield ahead.end(), last
            at = last
        at = body.find(_TOKENS, at)


def _end_of_flat(body: bytes, first: int) -> int:
    """Where the list that begins at `first` ends; -1 when a string or another list is in it.

    Never looks past the next quote: a body full of `"tokens"` would be read from each of them to its end.
    """
    quote = body.find(b'"', first)
    last = body.find(b"]", first, quote if quote >= 0 else len(body))
    return last if last >= 0 and body.find(b"[", first, last) < 0 else -1


def _unescaped(key: bytes) -> bytes:
    r"""`"\u0061"` and `"a"` are one key."""
    return msgspec.json.decode(b'"' + key + b'"', type=str).encode() if b"\\" in key else key
