"""Parse and bound what a client sends: limits, the request parser, and the reply to what breaks a rule.

httptools splits bytes into requests. It refuses most of what smuggles (Content-Length with Transfer-Encoding, repeated
lengths, bare LF, folded lines) and leaves the rest to its caller. `RequestParser` adds:

- **Sizes.** httptools keeps a header to itself until the next one begins. So besides counting what it hands over,
  `is_stuck` bounds what it swallows without handing anything over.
- **Framing.** Refused here: codings before `chunked`, a coding that httptools refuses only after the request has
  begun, HTTP/0.9 and 2.0, RTSP, two Host headers, and the body of a request that asks for an upgrade, which httptools
  would read as the next request. Trailers are dropped.
- **Chunks.** A body in tiny chunks costs a call for each of them, so their number is bounded by the body's size.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote

import httptools

from shared.config import KIB, MIB
from shared.core.errors import BodyTooLarge, UnsupportedEncoding

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bounds of one client connection. The defaults are those of common servers unless a reason stands beside them."""

    url_bytes: int = 8 * KIB
    header_bytes: int = 16 * KIB
    head_bytes: int = 32 * KIB
    header_count: int = 100
    # A body may have `free_chunks` chunks, and one more for each `chunk_bytes` of it. A chunk costs 0.5 us.
    free_chunks: int = 256
    chunk_bytes: int = 128
    # Counted from the first byte of the request to the end of its headers.
    head_s: float = 30.0
    # A body has this long, plus the time that its bytes so far would take at the least rate.
    body_grace_s: float = 60.0
    # Far below any link that moves tokens for a living, far above what a trickling attacker pays for.
    least_bytes_per_s: int = 64 * KIB
    # A client that keeps its reply unread is looked at this often, and must have taken the least rate since.
    unread_s: float = 60.0
    keep_alive_s: float = 75.0
    # Requests parsed ahead of their turn; each costs about 3 KiB, and one read may hold 14,000 of the smallest.
    pipelined: int = 128
    # What is read and discarded after an early reply, in bytes on the wire: about what the socket buffers of both ends
    # hold, so that a client that blocks in send() can read why it was refused, instead of a reset.
    discard_bytes: int = 4 * MIB
    linger_s: float = 5.0
    # The transport asks the application to pause above this.
    write_buffer_bytes: int = 64 * KIB
    # What a connection reads ahead of its handler, in bytes on the wire: as much as uvloop reads at once, so that a
    # prompt of 32,768 tokens arrives without a pause.
    unread_body_bytes: int = 256 * KIB


class Refusal(Exception):
    """A request that breaks the protocol or a limit; `status` is an HTTP status, `detail` is for the caller."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail

    def encode(self) -> bytes:
        """Return the whole reply. It closes the connection."""
        body = json.dumps({"detail": self.detail}).encode()
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        return head.encode() + body


class Ended(Exception):
    """Raised to stop the parser: the last reply was given, and whatever follows is discarded unparsed."""


def refusal_of(error: httptools.HttpParserError) -> Refusal:
    """Return the refusal that one of our callbacks raised, or else put the parser's own complaint into words."""
    cause = error.__context__
    if isinstance(cause, Refusal):
        return cause
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        return Refusal(HTTPStatus.BAD_REQUEST, "The request's method is not one of HTTP's.")
    if isinstance(error, httptools.HttpParserInvalidURLError) or isinstance(cause, httptools.HttpParserInvalidURLError):
        return Refusal(HTTPStatus.BAD_REQUEST, "The request's target is not a valid URL.")
    if isinstance(error, httptools.HttpParserCallbackError):
        return Refusal(HTTPStatus.BAD_REQUEST, "The request could not be understood.")
    return Refusal(HTTPStatus.BAD_REQUEST, f"The request is not valid HTTP/1.1: {error}.")


_TOO_LARGE: Final = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
# Names that decide something while the headers still arrive.
_EXPECT: Final = b"expect"
_CONTENT_LENGTH: Final = b"content-length"
_DECISIVE: Final = frozenset({_EXPECT, _CONTENT_LENGTH, b"transfer-encoding"})
# A read of more than this is not searched for blanks: its headers are looked at one by one.
_SMALL_BYTES: Final = 4 * KIB
# ": " and the line's end.
_HEADER_OVERHEAD_BYTES: Final = 4


class RequestSink(Protocol):
    """The receiver of parsed requests. Each method may raise `Refusal` or `Ended`, which stops the parser."""

    def request_begins(self) -> None:
        """Take the head that the parser holds now."""
        ...

    def body_arrives(self, part: bytes) -> None: ...

    def request_ends(self) -> None: ...


class RequestParser:
    """The requests of one connection. Between `request_begins` and the next head it holds the current head.

    `headers` are as they came, in order, with names in lower case; `fields` is the same as a mapping.
    """

    def __init__(self, sink: RequestSink, limits: HttpLimits) -> None:
        # It holds our methods, we hold it: see `close`.
        self._parser = httptools.HttpRequestParser(self)
        # What follows a request with `Connection: close` is for `sink` to refuse.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._sink = sink
        self._limits = limits
        self.in_head = False
        self.body_bytes = 0
        self._counts_headers = False
        self._progress = (0, 0, 0)
        self._quiet_bytes = 0
        self._begun = b""

    def feed(self, data: bytes) -> None:
        """Parse what has arrived. Raises httptools' errors; `refusal_of` says what they mean.

        A request for an upgrade is an ordinary request, and what follows it is the next one.
        """
        self._data = self._begun + data if self._begun else data
        self._data_at = 0
        self._read_bytes = len(data)
        rest: bytes | memoryview = data
        while True:
            try:
                self._parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                rest = memoryview(rest)[upgrade.args[0] :]
            else:
                return

    def close(self) -> None:
        """Let go of the parser beneath: a connection would leave a reference cycle behind."""
        self._parser = self._sink = None  # type: ignore[assignment] # not fed again

    def is_stuck(self, size_bytes: int) -> bool:
        """Note that a request is not whole after `size_bytes` more; return whether nothing comes of all these bytes."""
        if self.in_head:
            self._count_headers_from_now_on()
            # No more than the head can have, whatever came before it.
            self._begun = self._data[-(self._limits.url_bytes + 2 * self._limits.head_bytes) :]
        progress = (len(self.url), len(self.headers), self.body_bytes)
        if progress != self._progress:
            self._progress = progress
            self._quiet_bytes = 0
            return False
        self._quiet_bytes += size_bytes
        return self._quiet_bytes > self._limits.head_bytes

    def _count_headers_from_now_on(self) -> None:
        if not self._counts_headers:
            self._counts_headers = True
            self._head_bytes = sum(len(name) + len(value) + _HEADER_OVERHEAD_BYTES for name, value in self.headers)

    # -- httptools' callbacks

    def on_message_begin(self) -> None:
        self.in_head = True
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.expects_continue = False
        self.has_body = False
        self.is_chunked = False
        self.body_bytes = 0
        # A small read holds no head that is too long, only one with too many headers.
        self._counts_headers = self._read_bytes > min(self._limits.header_bytes, self._limits.head_bytes)
        self._head_bytes = 0
        self._chunks = 0

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > self._limits.url_bytes:
            limit = self._limits.url_bytes
            raise Refusal(HTTPStatus.REQUEST_URI_TOO_LONG, f"The URL is longer than {limit} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._counts_headers:
            self._count_header(name, value)
            if not self.in_head:
                # A trailer: it must not change the headers of a request that already runs.
                return
        name = name.lower()
        if name in _DECISIVE:
            self._take_decisive(name, value)
        self.headers.append((name, value))

    def _count_header(self, name: bytes, value: bytes) -> None:
        size_bytes = len(name) + len(value) + _HEADER_OVERHEAD_BYTES
        self._head_bytes += size_bytes
        limits = self._limits
        if (
            size_bytes > limits.header_bytes
            or self._head_bytes > limits.head_bytes
            or (self.in_head and len(self.headers) == limits.header_count)
        ):
            raise self.too_large()

    def _take_decisive(self, name: bytes, value: bytes) -> None:
        value = value.rstrip(b" \t")
        if name == _EXPECT:
            self.expects_continue = value.lower() == b"100-continue"
        elif name == _CONTENT_LENGTH:
            self.has_body = value.strip(b"0") != b""
        else:
            self.has_body = self.is_chunked = True
            if value.lower() != b"chunked":
                raise Refusal(HTTPStatus.BAD_REQUEST, "The only Transfer-Encoding that is taken is chunked.")

    def on_headers_complete(self) -> None:
        if len(self._data) > _SMALL_BYTES or b" \r\n" in self._data or b"\t\r\n" in self._data:
            # httptools leaves trailing blanks where they are. Nearly no head has any, so this looks once for all.
            self.headers = [(name, value.rstrip(b" \t")) for name, value in self.headers]
        self.fields = dict(self.headers)
        self.method = self._parser.get_method()
        self.version = self._check_version()
        # Whether the client may send another request on this connection.
        self.keep_alive: bool = self.version != "1.0" and self._parser.should_keep_alive()
        if self.version == "1.0":
            # Interim replies came with 1.1: an older client would take one for the reply.
            self.expects_continue = False
        if len(self.headers) > self._limits.header_count:
            raise self.too_large()
        if len(self.fields) < len(self.headers) and is_repeated(self.headers, b"host"):
            raise Refusal(HTTPStatus.BAD_REQUEST, "The request has more than one Host header.")
        if self.has_body and self._parser.should_upgrade():
            raise Refusal(HTTPStatus.BAD_REQUEST, "A request with a body cannot ask for an upgrade of the protocol.")
        self._sink.request_begins()
        self.in_head = False
        # Trailers count, however small the read.
        self._counts_headers = True
        self._begun = b""
        # What an earlier request had come to says nothing of this one, even where the figures are equal.
        self._progress = (0, 0, 0)
        self._quiet_bytes = 0

    def _check_version(self) -> str:
        version: str = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise Refusal(HTTPStatus.BAD_REQUEST, f"The HTTP version is {version}, it must be 1.1 or 1.0.")
        # httptools takes `RTSP/1.0` too and does not report the protocol, so the request line is looked up.
        line = self.url + b" HTTP/"
        at = self._data.find(line, self._data_at)
        if at < 0:
            raise Refusal(HTTPStatus.BAD_REQUEST, "The request line is not one of HTTP/1.1 or HTTP/1.0.")
        self._data_at = at + len(line)
        return version

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > self._limits.free_chunks + self.body_bytes // self._limits.chunk_bytes:
            least_bytes = self._limits.chunk_bytes
            raise Refusal(
                HTTPStatus.BAD_REQUEST,
                f"The body comes in too many small chunks: they must have {least_bytes} bytes on average.",
            )

    def on_body(self, part: bytes) -> None:
        self.body_bytes += len(part)
        self._sink.body_arrives(part)

    def on_message_complete(self) -> None:
        self._sink.request_ends()

    def too_large(self) -> Refusal:
        """Return the refusal of a head that exceeds a limit."""
        limits = self._limits
        bounds = f"{limits.header_count} headers, {limits.header_bytes} bytes in one and {limits.head_bytes} in total"
        return Refusal(_TOO_LARGE, f"The request's headers are too large: at most {bounds}.")


def is_repeated(headers: list[tuple[bytes, bytes]], wanted: bytes) -> bool:
    """Return whether more than one of `headers` has this name."""
    return sum(name == wanted for name, _ in headers) > 1


# What needs no taking apart: nearly every request's. A second slash at the start would be read as a host.
_PLAIN: Final = re.compile(rb"/[A-Za-z0-9_.~-][A-Za-z0-9_.~/-]*")


def scope_of(method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    """Return the part of an ASGI scope that a head decides. Raises httptools' error when `url` is no URL."""
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": version,
        "method": method.decode("ascii"),
        "server": None,
        "root_path": "",
        "raw_path": url,
        "query_string": b"",
        "headers": headers,
        "state": {},
    }
    if _PLAIN.fullmatch(url):
        scope["path"] = url.decode("ascii")
        return scope
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    scope["path"] = unquote(path) if "%" in path else path
    scope["raw_path"] = parsed.path
    scope["query_string"] = parsed.query or b""
    return scope


def require_readable(headers: Mapping[bytes, bytes], limit_bytes: int) -> None:
    """Check what a head says of its body. Raises `BodyTooLarge` and, for any Content-Encoding, `UnsupportedEncoding`.

    No SDK compresses what comes here.
    """
    # httptools has refused what is not a number. A length with this many digits exceeds any limit: it is not parsed.
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > limit_bytes):
        raise too_large_body(limit_bytes)
    encoding = headers.get(b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        raise UnsupportedEncoding("a request must not be compressed: leave Content-Encoding out")


def too_large_body(limit_bytes: int) -> BodyTooLarge:
    """Return the error for a body above the limit."""
    return BodyTooLarge(
        f"the request's body is larger than {limit_bytes} bytes, the most that this path takes (see --max-body-bytes)"
    )
