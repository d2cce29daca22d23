"""An image in a prompt: the file itself, as text that can be handed on as it is.

Nothing is fetched for a chunk, and no address is handed on: a chunk that points elsewhere is refused.
"""

from __future__ import annotations

from binascii import a2b_base64
from typing import Any, Final

import msgspec

from shared.core.errors import BadRequest
from shared.core.model import Image

_ALPHABET: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_SIGNATURES: Final = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}
# Enough for any of the signatures.
_HEAD_CHARS: Final = 16
_MAX_TOKENS: Final = 2**20


def read_image(place: int, data: bytes, format_: bytes, expected_tokens: bytes) -> tuple[Image, int]:
    """The image of a chunk from the JSON of its fields, b"" for one that is not there; and how many tokens it counts.

    What the client expects is taken as it is: what an image really comes to only the upstream knows. Without it, one.
    Raises `BadRequest` that names the chunk by its place.
    """
    told = _value(format_)
    if not isinstance(told, str) or told not in _SIGNATURES:
        raise BadRequest(f"the format of prompt chunk {place}, an image, must be png or jpeg")
    text = _value(data)
    encoded = text.encode() if isinstance(text, str) and text.isascii() else b""
    if not _is_base64(encoded):
        raise BadRequest(f"the data of prompt chunk {place}, an image, must be the file in base64")
    if not a2b_base64(encoded[:_HEAD_CHARS]).startswith(_SIGNATURES[told]):
        raise BadRequest(f"the data of prompt chunk {place}, an image, is no {told} file")
    tokens = _value(expected_tokens)
    if tokens is None:
        return Image(told, encoded), 1
    if type(tokens) is not int or not 1 <= tokens <= _MAX_TOKENS:
        raise BadRequest(f"the expected_tokens of prompt chunk {place} must be an integer from 1 to {_MAX_TOKENS:,}")
    return Image(told, encoded), tokens


def _is_base64(encoded: bytes) -> bool:
    """Strictly: it is written into a request as it is."""
    padded = encoded[-2:].count(b"=")
    inside = encoded[: len(encoded) - padded]
    return bool(inside) and len(encoded) % 4 == 0 and not inside.translate(None, _ALPHABET)


def _value(raw: bytes) -> Any:
    return msgspec.json.decode(raw) if raw else None
