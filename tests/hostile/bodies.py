"""Name each class of body that would hold up a worker, with the reply that it gets.

tests/hostile bounds the work of each by counting; benchmarks/hostile.py prints its longest turn and its memory.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from shared.config import MIB
from tests.app_bench import API, request_id
from tests.worker_bench import session

if TYPE_CHECKING:
    from collections.abc import Callable

ASAMPLE: Final = f"{API}/asample"
_PNG: Final = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(1))


@dataclass(frozen=True)
class Hostile:
    """A body that `make` makes of about `size_bytes`, and the reply: its status, and words of its error."""

    path: str
    make: Callable[[int], bytes]
    size_bytes: int
    status: int
    words: str = ""


def filled(opening: bytes, item: bytes, closing: bytes, size_bytes: int) -> bytes:
    """A list of as many `item`s, with commas between them, as there is room for."""
    return b"%b%b%b" % (opening, b",".join([item] * (size_bytes // (len(item) + 1))), closing)


def asample(chunks_opening: bytes, chunks_closing: bytes, more: bytes = b"") -> tuple[bytes, bytes]:
    opening = b'{"prompt":{"chunks":[' + chunks_opening
    closing = chunks_closing + b']},"sampling_params":{"max_tokens":1},"sampling_session_id":"%b","seq_id":1%b}' % (
        session().sampling_session_id.encode(),
        more,
    )
    return opening, closing


def chunks(item: bytes, size_bytes: int) -> bytes:
    opening, closing = asample(b"", b"")
    return filled(opening, item, closing, size_bytes)


def sdk_chunks(size_bytes: int) -> bytes:
    """As `append_int` of the SDK makes them, with the blanks of Python's json."""
    opening, closing = asample(b"", b"")
    item = b'{"type": "encoded_text", "tokens": [151643]}'
    return opening + b", ".join([item] * (size_bytes // (len(item) + 2))) + closing


def one_list(item: bytes, size_bytes: int) -> bytes:
    opening, closing = asample(b'{"tokens":[', b"]}")
    return filled(opening, item, closing, size_bytes)


def beside_prompt(opening: bytes, item: bytes, closing: bytes, size_bytes: int) -> bytes:
    """A valid submission with a field more."""
    before, after = asample(b'{"tokens":[10,11]}', b"", b',"later":')
    return before + after[:-1] + filled(opening, item, closing, size_bytes) + b"}"


def images(size_bytes: int) -> bytes:
    opening, closing = asample(b'{"type":"image","format":"png","data":"', b'"}')
    return opening + _PNG + b"A" * (size_bytes // 4 * 4) + closing


def image_among_chunks(size_bytes: int) -> bytes:
    opening, closing = asample(b'{"tokens":[1]},' * 100 + b'{"type":"image","format":"png","data":"', b'"}')
    return opening + _PNG + b"A" * (size_bytes // 4 * 4) + closing


def acknowledgements(size_bytes: int, known: bool = True) -> bytes:
    ids = (request_id(number) if known else f"{number}" for number in range(1, size_bytes // 140))
    target = {"sampling_session_id": session().sampling_session_id}
    return json.dumps({"target": target, "timeout": 0.0, "retrieved_request_ids": list(ids)}).encode()


def nested(size_bytes: int) -> bytes:
    opening, closing = asample(b'{"tokens":[1]}', b"", b',"later":' + b"[" * size_bytes)
    return opening + closing


def escapes(path_field: bytes, size_bytes: int) -> bytes:
    return b'{"%b":":%b"}' % (path_field, b"\\n" * (size_bytes // 2))


_VALUES: Final = "values besides"
_BYTES: Final = "bytes besides"
_LISTS: Final = partial(filled, b'{"a":[', b'{"tokens":[1]}', b"]}")
HOSTILE: Final[dict[str, Hostile]] = {
    # A prompt in many chunks.
    "300,000 chunks of the SDK": Hostile(ASAMPLE, sdk_chunks, 13 * MIB, 400, "context window"),
    "the shortest chunks": Hostile(ASAMPLE, partial(chunks, b'{"tokens":[1]}'), 4 * MIB, 400, "context window"),
    "more chunks than any context": Hostile(
        ASAMPLE, partial(chunks, b'{"tokens":[1]}'), 9 * MIB, 400, "300,000 chunks"
    ),
    "chunks up to the limit": Hostile(ASAMPLE, partial(chunks, b'{"tokens":[1]}'), 63 * MIB, 400, "300,000 chunks"),
    "empty chunks": Hostile(ASAMPLE, partial(chunks, b'{"tokens":[]}'), 4 * MIB, 400, "empty"),
    "chunks with keys twice": Hostile(
        ASAMPLE, partial(chunks, b'{"tokens":[1],"tokens":[1]}'), 4 * MIB, 400, "given twice"
    ),
    "chunks with an unknown key": Hostile(ASAMPLE, partial(chunks, b'{"x":0,"tokens":[1]}'), 5 * MIB, 400, "context"),
    "chunks with blanks": Hostile(ASAMPLE, partial(chunks, b'{"tokens":[ 1 ]}'), 4 * MIB, 400, "context window"),
    "chunks of lists in lists": Hostile(ASAMPLE, partial(chunks, b'{"tokens":[[1]]}'), 4 * MIB, 400, "chunk 0"),
    "brackets instead of chunks": Hostile(ASAMPLE, partial(chunks, b'{"tokens":[1]}}'), 4 * MIB, 400, "not"),
    # Lists of tokens that belong to no prompt.
    "token lists in no prompt": Hostile(ASAMPLE, _LISTS, 9 * MIB, 400, "chunks"),
    "few token lists in no prompt": Hostile(ASAMPLE, _LISTS, 4 * MIB, 400, "no prompt"),
    "token lists beside the prompt": Hostile(
        ASAMPLE, partial(beside_prompt, b"[", b'{"tokens":[1]}', b"]"), 4 * MIB, 400, _BYTES
    ),
    "token lists in a poll": Hostile(f"{API}/retrieve_future", _LISTS, MIB - 20, 400, _VALUES),
    "token lists in a session": Hostile(f"{API}/create_session", _LISTS, MIB - 20, 400, _VALUES),
    "token lists in a session poll": Hostile(f"{API}/retrieve_futures", _LISTS, 16 * MIB - 20, 400, _BYTES),
    # Long lists.
    "one list up to the limit": Hostile(ASAMPLE, partial(one_list, b"151643"), 63 * MIB, 400, "context window"),
    "one list of digits": Hostile(ASAMPLE, partial(one_list, b"1"), 63 * MIB, 400, "context window"),
    "one list with blanks": Hostile(ASAMPLE, partial(one_list, b"\n 1"), 63 * MIB, 400, "context window"),
    "one list of negative numbers": Hostile(ASAMPLE, partial(one_list, b"-1"), 63 * MIB, 400, "non-negative"),
    # What is read besides.
    "values beside the prompt": Hostile(ASAMPLE, partial(beside_prompt, b"[", b"[]", b"]"), MIB // 2, 400, _VALUES),
    "many values beside the prompt": Hostile(ASAMPLE, partial(beside_prompt, b"[", b"[]", b"]"), 63 * MIB, 400, _BYTES),
    "a long text beside the prompt": Hostile(ASAMPLE, partial(beside_prompt, b'"', b"x", b'"'), 63 * MIB, 400, _BYTES),
    "the word tokens": Hostile(ASAMPLE, partial(beside_prompt, b"[", b'"tokens"', b"]"), 63 * MIB, 400, _BYTES),
    "quotes": Hostile(ASAMPLE, lambda size_bytes: b'"' * size_bytes, 63 * MIB, 400, "bytes"),
    "blanks": Hostile(ASAMPLE, lambda size_bytes: b'{"tokens"' + b" " * size_bytes, 63 * MIB, 400, "bytes"),
    "nesting": Hostile(ASAMPLE, nested, MIB // 2, 400, "not a valid sample request"),
    "stop strings": Hostile(
        ASAMPLE, partial(beside_prompt, b'0,"sampling_params":{"stop":[', b'"a"', b"]}"), MIB // 2, 400, _VALUES
    ),
    "a key of escapes": Hostile(f"{API}/create_session", partial(escapes, b"sdk_version"), MIB - 40, 200),
    "many keys": Hostile(
        f"{API}/client/config",
        lambda size_bytes: json.dumps({f"{number:x}": 0 for number in range(size_bytes // 12)}).encode(),
        MIB,
        400,
        _VALUES,
    ),
    "a number without end": Hostile(
        f"{API}/client/config", lambda size_bytes: b'{"a":' + b"1" * size_bytes + b"}", MIB - 20, 400, "not a valid"
    ),
    # Images.
    "an image up to the limit": Hostile(ASAMPLE, images, 63 * MIB, 400, "of type 'image'"),
    "an image among many chunks": Hostile(ASAMPLE, image_among_chunks, 63 * MIB, 400, "context window"),
    # Lists of ids.
    "99,000 acknowledgements": Hostile(f"{API}/retrieve_futures", acknowledgements, 99_000 * 140, 200),
    "unknown acknowledgements": Hostile(
        f"{API}/retrieve_futures", partial(acknowledgements, known=False), 180_000 * 140, 200
    ),
    "more acknowledgements than samples": Hostile(
        f"{API}/retrieve_futures", partial(acknowledgements, known=False), 300_000 * 140, 400, "200,000 ids"
    ),
    # OpenAI's API.
    "many prompts": Hostile(
        "/v1/completions", partial(filled, b'{"model":"sim/tiny","prompt":[', b'"a"', b"]}"), 15 * MIB, 400, "texts"
    ),
    "many prompts of tokens": Hostile(
        "/v1/completions", partial(filled, b'{"model":"sim/tiny","prompt":[', b"[1]", b"]}"), 15 * MIB, 400, "prompts"
    ),
    "many fields": Hostile(
        "/v1/chat/completions",
        lambda size_bytes: json.dumps({f"{number:x}": 0 for number in range(size_bytes // 12)}).encode(),
        15 * MIB,
        400,
        "texts",
    ),
    "values in a field": Hostile(
        "/v1/chat/completions", partial(filled, b'{"messages":[', b"[]", b"]}"), 15 * MIB, 400, "model is missing"
    ),
}
