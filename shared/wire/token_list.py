"""A JSON list of token ids as bytes: what it may look like, and how many there are, without an object per token.

A list that passes here is valid JSON, flat, and of non-negative integers in their one plain spelling. Whether an id is
in the vocabulary is the upstream's to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from shared.wire import document

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Every digit as 0, a comma as itself, all else as x: what a list looks like, at one pass in C.
_SHAPE: Final = bytes(0x30 if code in b"0123456789" else 0x2C if code == 0x2C else 0x78 for code in range(256))
# A number of ten digits may be above 2**31 - 1, and no vocabulary comes near: cheaper to tell than the exact bound.
_TEN_DIGITS: Final = b"0" * 10
# Where numpy's dozen calls cost less than a search for each of what may not be in it.
_LONG_BYTES: Final = 4096
_COMMA: Final = 0x2C
# What has its code between a comma's and a digit's.
_BETWEEN: Final = (b"-", b".", b"/")
_ZERO: Final = 0x30
_NINE: Final = 0x39


def count(inside: bytes) -> int | None:
    """How many ids stand in `inside` (`b"1,2,3"`, without brackets); None when it is no plain list of 1 and more."""
    return _count_long(inside) if len(inside) >= _LONG_BYTES else _count_short(inside)


def _count_short(inside: bytes) -> int | None:
    shape = inside.translate(_SHAPE)
    if b"x" in shape or _TEN_DIGITS in shape:
        return None
    # A comma too much and a zero in front are no JSON: its parser sees them in less time than two searches take.
    try:
        return len(document.load(b"[%b]" % inside)) or None
    except document.UNREADABLE:
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
    """Whether a number is empty, or has a zero in front of its digits; neither end is a comma."""
    starts = codes[1:] <= _ZERO
    starts &= commas[:-1]
    suspects = np.flatnonzero(starts) + 1
    if codes[0] == _ZERO and not commas[1]:
        return True
    # Whoever is last is no comma, so a zero that stands alone; of the others a comma must follow, on a zero.
    suspects = suspects[suspects < len(codes) - 1]
    return bool((commas[suspects] | ~commas[suspects + 1]).any())


def _some_run_of_ten(commas: NDArray[np.bool_]) -> bool:
    # Wherever it begins, a run of ten holds four neighbouring pairs, each of bytes 2k and 2k + 1.
    twos = commas[: len(commas) // 2 * 2].view(np.uint16) == 0
    fours = twos[1:] & twos[:-1]
    return bool((fours[2:] & fours[:-2]).any()) and _some_exact_run_of_ten(~commas)


def _some_exact_run_of_ten(digits: NDArray[np.bool_]) -> bool:
    twos = digits[1:] & digits[:-1]
    fours = twos[2:] & twos[:-2]
    eights = fours[4:] & fours[:-4]
    return bool((eights[2:] & twos[:-8]).any())
