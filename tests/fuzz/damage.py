"""Real bytes, damaged: what a parser meets when it is not meant well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Sequence

# What breaks parsers of JSON, of protobuf and of Redis' protocol.
WORDS: Final = (
    *(b"NaN", b"-Infinity", b"1e400", b"-0", b"0.5", b"18446744073709551616", b"9" * 5000, b"1E-400"),
    *(b"null", b"{}", b"[]", b'""', b'"\\ud800"', b'"\xff"', b"[" * 1500, b'{"a":' * 1500, b"\\u0000"),
    *(b"\x00", b"\xff" * 10, b"\x80" * 10 + b"\x01", b"\r\n", b"$-1\r\n", b"*1000000000\r\n", b"-MOVED x\r\n", b" "),
)


@st.composite
def _damaged(draw: st.DrawFn, originals: Sequence[bytes]) -> bytes:
    data = draw(st.sampled_from(originals))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(start + draw(st.integers(0, 40)), len(data))
        piece = draw(st.sampled_from((b"", data[start:end] * 2, *WORDS)) | st.binary(max_size=8))
        data = data[:start] + piece + data[end:]
    return data


def damaged(*originals: bytes) -> st.SearchStrategy[bytes]:
    """One of `originals` with up to four places cut out, doubled, or replaced; now and then whole."""
    return _damaged(originals)
