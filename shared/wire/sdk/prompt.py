"""Read the prompt of an `asample` body: token ids as the client's own bytes, images as the client's own base64.

No Python object is made per token. A prompt has tens of MiB at most, in up to `MAX_CHUNKS` chunks (the SDK's
`append_int` makes a chunk of each token), and one parser call on all of it would hold up the event loop. So the prompt
is taken out of the body in bounded steps, and what is left is small:

- Up to `MOST_LISTS` token lists, and long images, are each replaced by a text that names its place among them.
- Of a body with more lists the whole array of chunks is read piece by piece, and one chunk stands in for all.

A text that stands in is found again by its bytes, so a body that holds such a text already is refused.

Nothing is fetched for a chunk and no address is handed on: a chunk that points elsewhere is refused.
"""

from __future__ import annotations

import re
from binascii import a2b_base64
from typing import TYPE_CHECKING, Any, Final

import msgspec

from shared.core.errors import BadRequest
from shared.core.model import IMAGE_MARK, Image
from shared.wire import json_arrays
from shared.wire.strict_json import BLANKS, MAX_VALUES, Boundary, array_pieces, parse, require_short

if TYPE_CHECKING:
    from shared.wire.strict_json import Steps

# More than the longest context of any model whose client sends a chunk for each token.
MAX_CHUNKS: Final = 300_000
MOST_LISTS: Final = 64
# How much of a token list one step reads. A step that does less for each byte reads `_LONG_STEP_BYTES`.
STEP_BYTES: Final = 256 * 1024
_LONG_STEP_BYTES: Final = 8 * STEP_BYTES
# Images are taken out of a body that has more than this besides its tokens.
_LONG_BYTES: Final = 64 * 1024
_LONG_IMAGE_BYTES: Final = 1024
# A list that is not one of token ids stays in the body, where its chunk is known, unless it is longer.
_LONG_ODD_BYTES: Final = 16 * 1024
# A piece of the array of chunks that is longer than this is one chunk.
_LONG_CHUNK_BYTES: Final = 256 * 1024

_WHITE: Final = b" \n\r\t"
_TOKENS: Final = b'"tokens"'
_DATA: Final = b'"data"'
_LIST_AHEAD: Final = re.compile(rb"%b:%b\[" % (BLANKS, BLANKS))
_TEXT_AHEAD: Final = re.compile(rb'%b:%b"' % (BLANKS, BLANKS))
_CHUNKS: Final = b'"chunks"'
_BETWEEN_CHUNKS: Final = Boundary(b"{", b"}")
# Texts that stand in for what was taken out. Neither `@` nor a blank is a character of base64.
_LIST_MARK: Final = b'"@tokens '
_IMAGE_MARK: Final = b'"@data '
_CHUNKS_MARK: Final = "@chunks"
_CHUNKS_STAND_IN: Final = b'{"type":"@chunks"}'

_ALPHABET: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_SIGNATURES: Final = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}
# Enough for any of the signatures.
_HEAD_CHARS: Final = 16
_MAX_IMAGE_TOKENS: Final = 2**20


class Chunk(msgspec.Struct, gc=False):
    """One element of `prompt.chunks`, with its values as JSON; b"" for one that is absent."""

    type: str | None = None
    tokens: msgspec.Raw = msgspec.Raw()
    data: msgspec.Raw = msgspec.Raw()
    format: msgspec.Raw = msgspec.Raw()
    expected_tokens: msgspec.Raw = msgspec.Raw()
    location: msgspec.Raw = msgspec.Raw()
    dmel: msgspec.Raw = msgspec.Raw()


_chunks: Final = msgspec.json.Decoder(list[Chunk])
_any_list: Final = msgspec.json.Decoder(list[msgspec.Raw])


class Prompt:
    """A prompt while it is read: what was taken out of the body, then the ids, tokens and images of its chunks.

    `parts` are comma-separated ids, or `IMAGE_MARK`; they are joined when all chunks are read.
    """

    def __init__(self, most_lists: int = MOST_LISTS) -> None:
        self._most_lists = most_lists
        self.parts: list[bytes] = []
        self.tokens = 0
        self.images: list[Image] = []
        self._chunks = 0
        self._lists: list[tuple[bytes, int]] = []
        self._data: list[bytes] = []
        self._is_read = False

    def take_out(self, body: bytes) -> Steps[bytes]:
        """Return what is left of `body` without its long parts. Raises `BadRequest`."""
        if len(body) > _LONG_STEP_BYTES:
            yield
        rest = yield from self._take_out_few(body)
        return rest if rest is not None else (yield from self._take_out_chunks(body))

    def read(self, chunks: list[Chunk]) -> Steps[None]:
        """Read the chunks of the body whose long parts were taken out. Raises `BadRequest` that names a chunk."""
        if not self._is_read:
            yield from self._read(chunks)
        elif [chunk.type for chunk in chunks] != [_CHUNKS_MARK]:
            raise BadRequest("the request holds more lists of tokens than its prompt")
        if not self.parts:
            raise BadRequest("the prompt is empty: it needs at least one token")

    # -- taking out

    def _take_out_few(self, body: bytes) -> Steps[bytes | None]:
        """Return `body` with a mark for each token list and long image; None if there are too many lists."""
        rest = yield from self._take_out_lists(body)
        if rest is None:
            return None
        if len(rest) > _LONG_BYTES:
            yield
            rest = yield from self._take_out_images(rest)
        require_short(len(rest))
        if rest.count(_LIST_MARK) != len(self._lists) or rest.count(_IMAGE_MARK) != len(self._data):
            raise BadRequest("the request holds a text that begins with '@tokens ' or '@data '")
        return rest

    def _take_out_lists(self, body: bytes) -> Steps[bytes | None]:
        parts: list[bytes | memoryview] = []
        view = memoryview(body)
        kept_to = seen = 0
        at = yield from _find(body, _TOKENS, 0)
        while at >= 0:
            if seen == self._most_lists:
                return None
            seen += 1
            at += len(_TOKENS)
            ahead = _LIST_AHEAD.match(body, at)
            if ahead is not None:
                first = ahead.end()
                # Never look past the next quote: a body full of `"tokens"` would be read from each of them to its end.
                quote = body.find(b'"', first)
                last = body.find(b"]", first, quote if quote >= 0 else len(body))
                ids = (yield from _plain_ids(body, first, last)) if last >= 0 else None
                if ids is not None:
                    parts += (view[kept_to : first - 1], b'"@tokens %d"' % len(self._lists))
                    self._lists.append(ids)
                    kept_to = last + 1
                elif last - first > _LONG_ODD_BYTES:
                    raise BadRequest("a list of tokens must hold non-negative integers below 1,000,000,000 only")
                at = max(at, last)
            at = yield from _find(body, _TOKENS, at)
        return b"".join((*parts, view[kept_to:])) if parts else body

    def _take_out_images(self, body: bytes) -> Steps[bytes]:
        parts: list[bytes | memoryview] = []
        view = memoryview(body)
        kept_to = seen = 0
        at = yield from _find(body, _DATA, 0)
        while at >= 0:
            if seen == MAX_VALUES:
                raise BadRequest(f"the request holds more than {MAX_VALUES} images")
            seen += 1
            at += len(_DATA)
            ahead = _TEXT_AHEAD.match(body, at)
            last = body.find(b'"', ahead.end()) if ahead is not None else -1
            if ahead is not None and last - ahead.end() >= _LONG_IMAGE_BYTES:
                parts += (view[kept_to : ahead.end() - 1], b'"@data %d"' % len(self._data))
                self._data.append(body[ahead.end() : last])
                kept_to = at = last + 1
                if last - ahead.end() > STEP_BYTES:
                    yield
            at = yield from _find(body, _DATA, at)
        return b"".join((*parts, view[kept_to:])) if parts else body

    def _take_out_chunks(self, body: bytes) -> Steps[bytes]:
        """Read the chunks piece by piece and return `body` with one chunk that stands in for all."""
        yield
        if body.count(b"{") > MAX_CHUNKS + MOST_LISTS:
            raise BadRequest(f"the prompt has more than {MAX_CHUNKS:,} chunks")
        yield
        at = yield from _find(body, _CHUNKS, 0)
        ahead = _LIST_AHEAD.match(body, at + len(_CHUNKS)) if at >= 0 else None
        if ahead is None:
            raise BadRequest("the request holds many lists of tokens and no prompt")
        self._lists.clear()
        start = end = ahead.end()
        for piece, behind in array_pieces(body, start, _BETWEEN_CHUNKS):
            yield from self._read_piece(piece)
            end = behind
            yield
        self._is_read = True
        require_short(len(body) - (end - start))
        rest = b"".join((body[:start], _CHUNKS_STAND_IN, body[end:]))
        if rest.count(_CHUNKS_STAND_IN) != 1:
            raise BadRequest(f"the request holds a text that is {_CHUNKS_MARK!r}")
        return rest

    def _read_piece(self, piece: bytes) -> Steps[None]:
        if len(piece) > _LONG_CHUNK_BYTES:
            chunk = Prompt()
            yield
            rest = yield from chunk._take_out_few(piece)
            if rest is None:
                raise BadRequest(f"prompt chunk {self._chunks} is longer than its tokens or its image")
            piece, self._lists, self._data = rest, chunk._lists, chunk._data
        elif _LIST_MARK in piece or _IMAGE_MARK in piece:
            raise BadRequest("the request holds a text that begins with '@tokens ' or '@data '")
        if not self._read_plain(piece):
            yield from self._read(parse(_chunks, b"[%b]" % piece, "sample request"))
        if self._chunks > MAX_CHUNKS:
            raise BadRequest(f"the prompt has more than {MAX_CHUNKS:,} chunks")

    # -- reading

    def _read_plain(self, piece: bytes) -> bool:
        """Read chunks that have token lists, and at most a type, all at once. Return whether they are such chunks."""
        try:
            chunks = _chunks.decode(b"[%b]" % piece)
        except msgspec.MsgspecError:
            return False
        types = [chunk.type for chunk in chunks]
        lists = [bytes(chunk.tokens) for chunk in chunks]
        # With as many colons as keys that were read, no key is unknown or given twice.
        keys = 2 * len(types) - types.count(None)
        if not all(lists) or keys != piece.count(b":") or not {None, "encoded_text"}.issuperset(types):
            return False
        joined = b"".join([tokens for tokens in lists if tokens != b"[]"]).replace(b"][", b",")
        if joined:
            ids = _ids(joined[1:-1]) if joined.startswith(b"[") else None
            if ids is None:
                return False
            self._add(*ids)
        self._chunks += len(chunks)
        return True

    def _read(self, chunks: list[Chunk]) -> Steps[None]:
        for chunk in chunks:
            kind = chunk.type or _kind_of(chunk)
            if kind == "encoded_text":
                self._add(*self._ids_of(chunk))
            elif kind == "image":
                self.images.append((yield from self._image_of(chunk)))
                self._add(IMAGE_MARK, _expected_tokens(self._chunks, chunk))
            else:
                reason = _REASONS.get(kind, "there is no such type")
                raise BadRequest(f"prompt chunk {self._chunks} is of type {kind[:40]!r}: {reason}")
            self._chunks += 1

    def _add(self, ids: bytes, tokens: int) -> None:
        if tokens:
            self.parts.append(ids)
            self.tokens += tokens

    def _ids_of(self, chunk: Chunk) -> tuple[bytes, int]:
        raw = bytes(chunk.tokens)
        if raw.startswith(_LIST_MARK):
            return self._lists[int(raw[len(_LIST_MARK) : -1])]
        ids = _ids(raw[1:-1]) if raw.startswith(b"[") else None
        if ids is not None:
            return ids
        where = f"the tokens of prompt chunk {self._chunks} must be"
        if raw.startswith(b"[") and not raw[1:-1].translate(None, b"0123456789," + _WHITE):
            # msgspec has read it, so it is valid JSON: only its size can be wrong.
            raise BadRequest(f"{where} below 1,000,000,000")
        raise BadRequest(f"{where} a list of non-negative integers")

    def _image_of(self, chunk: Chunk) -> Steps[Image]:
        """Return the image of a chunk, whose base64 is checked strictly: it is written into a request as it is."""
        place, format_ = self._chunks, _value(chunk.format)
        if not isinstance(format_, str) or format_ not in _SIGNATURES:
            raise BadRequest(f"the format of prompt chunk {place}, an image, must be png or jpeg")
        raw = bytes(chunk.data)
        data = self._data[int(raw[len(_IMAGE_MARK) : -1])] if raw.startswith(_IMAGE_MARK) else raw[1:-1]
        if b"\\" in data and data.count(b"\\") == data.count(b"\\/"):
            # Some JSON libraries escape slashes.
            data = data.translate(None, b"\\")
        inside = len(data) - data[-2:].count(b"=")
        is_base64 = raw.startswith(b'"') and inside > 0 and len(data) % 4 == 0
        for start in range(0, inside, STEP_BYTES):
            if data[start : min(start + STEP_BYTES, inside)].translate(None, _ALPHABET):
                is_base64 = False
                break
            if inside - start > STEP_BYTES:
                yield
        if not is_base64:
            raise BadRequest(f"the data of prompt chunk {place}, an image, must be the file in base64")
        if not a2b_base64(data[:_HEAD_CHARS]).startswith(_SIGNATURES[format_]):
            raise BadRequest(f"the data of prompt chunk {place}, an image, is no {format_} file")
        return Image(format_, data)


def _find(body: bytes, text: bytes, at: int) -> Steps[int]:
    """Find `text` from `at` on; -1 if it is not there. Near misses may take 4 ns for each byte."""
    while True:
        behind = at + _LONG_STEP_BYTES
        found = body.find(text, at, behind + len(text))
        if found >= 0 or behind >= len(body):
            return found
        at = behind
        yield


def _plain_ids(body: bytes, first: int, last: int) -> Steps[tuple[bytes, int] | None]:
    """Return the ids of the token list between two positions and their number; None if it is not a list of ids."""
    if last - first <= STEP_BYTES:
        return _ids(body[first:last])
    # Pieces without blanks are views of the body itself, so that they are copied only once.
    parts: list[bytes | memoryview] = []
    view = memoryview(body)
    tokens = 0
    while first <= last:
        end = last if last - first <= STEP_BYTES else body.rfind(b",", first, first + STEP_BYTES)
        ids = _ids(body[first:end]) if end >= 0 else None
        if ids is None or not ids[1]:
            return None
        parts.append(view[first:end] if len(ids[0]) == end - first else ids[0])
        tokens += ids[1]
        first = end + 1
        yield
    joined = b",".join(parts)
    yield
    return joined, tokens


def _ids(inside: bytes) -> tuple[bytes, int] | None:
    """Return the ids of a list without its brackets, and without blanks, and their number; None if some are no ids."""
    tokens = json_arrays.count(inside)
    if tokens is None:
        # As Python's json writes it.
        inside = inside.replace(b", ", b",").strip(_WHITE)
        if not inside:
            return b"", 0
        tokens = json_arrays.count(inside)
    if tokens is None and not inside.translate(None, b"0123456789," + _WHITE):
        try:
            _any_list.decode(b"[%b]" % inside)
        except msgspec.MsgspecError:
            return None
        inside = inside.translate(None, _WHITE)
        tokens = json_arrays.count(inside)
    return (inside, tokens) if tokens is not None else None


_REASONS: Final = {
    "image_asset_pointer": "nothing is fetched for a prompt; send the file itself, in a chunk of type 'image'",
    "dmel": "no upstream can be asked with it; allowed are encoded_text and image",
}


def _kind_of(chunk: Chunk) -> str:
    """Return the type of a chunk that names none, as SDK 0.16.1 sends it, by its keys."""
    if chunk.location:
        return "image_asset_pointer"
    if chunk.data:
        return "image"
    return "dmel" if chunk.dmel else "encoded_text"


def _expected_tokens(place: int, chunk: Chunk) -> int:
    """Return how many tokens the client expects of an image, by default one: only the upstream knows better."""
    tokens = _value(chunk.expected_tokens)
    if tokens is None:
        return 1
    if type(tokens) is not int or not 1 <= tokens <= _MAX_IMAGE_TOKENS:
        raise BadRequest(
            f"the expected_tokens of prompt chunk {place} must be an integer from 1 to {_MAX_IMAGE_TOKENS:,}"
        )
    return tokens


def _value(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw) if bytes(raw) else None
