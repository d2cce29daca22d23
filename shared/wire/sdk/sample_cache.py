"""An `asample` body apart: what differs from one of a client's bodies to the next, and the frame that does not.

What differs is the prompt's ids and three numbers. The frame is the rest; one and the same frame says one and the same
thing whatever stands in its gaps, so it is read and checked once (`tinker_sample.py`). What a gap is in the document is
not looked at here: that is found out by reading the frame with marks in its gaps.

What was worked out lately, by what it was worked out from.
"""

from __future__ import annotations

import re
from typing import Final, Generic, TypeVar

# What is between the gaps, and the name of each number. The gaps of lists are where `"tokens":[]` stands.
Frame = tuple[bytes, ...]

# A client's own is some 500 bytes, and has a list for each message of a conversation.
_LONGEST_FRAME_BYTES: Final = 4096
_MOST_LISTS: Final = 64
_LIST: Final = b'"tokens":['
# As Python's json writes it.
_SPACED_LIST: Final = b'"tokens": ['
# Spelled plainly, and within 64 bits.
_NUMBER: Final = re.compile(rb'"(max_tokens|seed|seq_id)": ?(0|[1-9][0-9]{0,17})(?=[,}])')
# Of three numbers, each with its name.
_MOST_PIECES: Final = 10
# What could be told as well, and is not by chance; those of the lists are counted on.
MARKS: Final = {b"max_tokens": 1_720_575_942, b"seed": 720_575_940_379_279_361, b"seq_id": 720_575_940_379_279_362}
_FIRST_TOKEN_MARK: Final = 720_570_000


def cut(body: bytes) -> tuple[Frame, list[bytes], list[bytes]] | None:
    """The frame, the insides of the lists without the blanks that Python's json writes, the numbers.

    None when the body has another form, or a long frame. That the whole is valid is not said.
    """
    opening = _LIST
    at = body.find(opening)
    if at < 0:
        opening = _SPACED_LIST
        at = body.find(opening)
    parts: list[bytes] = []
    lists: list[bytes] = []
    kept_to, left_bytes = 0, len(body)
    while at >= 0:
        first = at + len(opening)
        last = body.find(b"]", first)
        if last < 0 or len(lists) == _MOST_LISTS:
            return None
        parts.append(body[kept_to:first])
        lists.append(body[first:last])
        kept_to = last
        left_bytes -= last - first
        at = body.find(opening, last)
    if not lists or left_bytes > _LONGEST_FRAME_BYTES:
        return None
    parts.append(body[kept_to:])
    pieces = _NUMBER.split(b"".join(parts))
    if len(pieces) > _MOST_PIECES:
        return None
    numbers = pieces[2::3]
    del pieces[2::3]
    if opening is _SPACED_LIST:
        lists = [inside.replace(b", ", b",") for inside in lists]
    return tuple(pieces), lists, numbers


def marked(frame: Frame) -> tuple[bytes, bytes] | None:
    """A body with this frame and a mark in each gap, and the marks of its lists as a prompt.

    None where a mark would not be the only one of its kind.
    """
    body = frame[0]
    for name, piece in zip(frame[1::2], frame[2::2], strict=True):
        body += b'"%b":%d%b' % (name, MARKS[name], piece)
    # The same that `cut` has looked for.
    opening = _LIST if _LIST in body else _SPACED_LIST
    first, *others = body.split(opening)
    marks = [b"%d" % (_FIRST_TOKEN_MARK + number) for number in range(len(others))]
    body = first + b"".join(opening + mark + other for mark, other in zip(marks, others, strict=True))
    told = (*marks, *(b"%d" % MARKS[name] for name in frame[1::2]))
    return (body, b",".join(marks)) if all(body.count(mark) == 1 for mark in told) else None


K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Keeps from `most` to twice as many values. What is asked for stays; of the rest the oldest go, half at a time.

    Who fills it with what nobody asks for again displaces others only if he adds `most` between two of their uses.
    """

    __slots__ = ("_most", "_new", "_old")

    def __init__(self, most: int) -> None:
        self._most = most
        self._new: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def get(self, key: K) -> V | None:
        value = self._new.get(key)
        if value is None:
            value = self._old.pop(key, None)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        if len(self._new) >= self._most:
            self._old, self._new = self._new, {}
        self._new[key] = value
