"""JSON as a careful server reads it: what is not plainly valid is one sentence for the caller, never a guess.

msgspec checks syntax, types and depth, refuses NaN and Infinity, and keeps integers integers. Two things it passes
over: text that is not UTF-8 in fields that nobody asked for, and a key that is given twice, of which it takes the last
while other readers of the same bytes take the first. Both are refused here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from shared.core.errors import BadRequest

if TYPE_CHECKING:
    from msgspec.json import Decoder

T = TypeVar("T")

_SHOWN_CHARS: Final = 40
# By far the longest part of a body, and free of keys: taken out before its structure is looked at.
_TOKENS: Final = re.compile(rb'"tokens"\s*:\s*\[[^\]"{]*\]')
_STRUCTURE: Final = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?|([{}])', re.DOTALL)


def decode(decoder: Decoder[T], body: bytes, what: str) -> T:
    """`body` by `decoder`. Raises `BadRequest` that says it is not a valid `what`."""
    try:
        if not body.isascii():
            body.decode()
        value = decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadRequest(f"the request is not a valid {what}: {error}") from None
    key = repeated_key(body)
    if key is not None:
        raise BadRequest(f"the request is not a valid {what}: the key {key[:_SHOWN_CHARS]!r} is given twice")
    return value


def repeated_key(body: bytes) -> str | None:
    """A key that some object of `body`, which must be valid JSON, holds twice."""
    open_objects: list[set[bytes]] = []
    for text, colon, brace in _STRUCTURE.findall(_TOKENS.sub(b'"tokens":0', body)):
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


def _unescaped(key: bytes) -> bytes:
    r"""`"\u0061"` and `"a"` are one key."""
    return msgspec.json.decode(b'"' + key + b'"', type=str).encode() if b"\\" in key else key
