"""What an upstream says in words: whole for the client whose request it was, filtered for everybody else.

An upstream's words may quote a prompt. So nothing of them is logged, shown to operators, or kept for other samples
before it went through `shown` or `shown_words`: a known sentence of vLLM or a proxy stays as it is, of anything else at
most 80 characters, without digits and without what is quoted.
"""

from __future__ import annotations

import json
import re
from typing import Final

_MOST_CHARS: Final = 500
_SHOWN_CHARS: Final = 80
# Enough to hold any message; an error page can be of any size.
_READ_BYTES: Final = 64 * 1024

_NUMBER: Final = r"-?[0-9]{1,12}(?:\.[0-9]{1,6})?"
# What vLLM and routers in front of it say, with {N} for a number. What names a token id is not here: it is a part of a
# prompt.
_SENTENCES: Final = (
    r"EngineCore encountered an issue\. See stack trace \(above\) for the root cause\.",
    (
        r"The engine is currently busy and cannot accept new requests\. Please try again later or on a different"
        r" instance\."
    ),
    r"Out of range float values are not JSON compliant",
    r"n must be (?:1 when using greedy sampling|at least 1), got {N}\.",
    r"Requested (?:sample|prompt) logprobs of {N}, which is greater than max allowed: {N}",
    r"max_tokens={N} cannot be greater than max_model_len={N}\. Please request fewer output tokens\.",
    r"max_tokens must be at least 1, got {N}\.",
    r"(?:temperature|top_p|top_k|min_p) must be in [\[(]{N}, {N}[\])], got {N}\.",
    (
        r"This model's maximum context length is {N} tokens\. However, your prompt contains at least {N} input tokens,"
        r" which exceeds this limit even without any output tokens\. Please reduce the length of the input prompt\."
    ),
    r"You must pass at least one prompt",
    (
        r"Call to add_lora method failed: Worker failed with error 'LoRA rank {N} is greater than max_lora_rank {N}\.',"
        r" please check the stack trace above for the root cause"
    ),
    r"LoRA rank {N} is greater than max_lora_rank {N}\.",
    r"Request failed: error sending request for url \(https?://[A-Za-z0-9._:/\[\]-]{1,200}\)",
    r"No available workers \(all circuits open or unhealthy\)",
    r"length limit exceeded",
    r"no healthy upstream",
    r"upstream connect error or disconnect/reset before headers",
    (
        r"(?:{N} )?(?:Bad Request|Unauthorized|Forbidden|Not Found|Method Not Allowed|Request Entity Too Large"
        r"|Too Many Requests|Internal Server Error|Bad Gateway|Service (?:Temporarily )?Unavailable"
        r"|Gateway (?:Timeout|Time-out))"
    ),
)
_PARAMETER: Final = r"(?: \(parameter=[a-z_]{1,40}, value={N}\))?"
_KNOWN: Final = re.compile(f"(?:{'|'.join(_SENTENCES)}){_PARAMETER}".replace("{N}", _NUMBER))
# Where something quoted begins: a quote that is no apostrophe, markup, a list or an object.
_QUOTE: Final = re.compile(r"""["`<\[{“”\u2018„«]|(?<![A-Za-z]{2})'|'(?!(?:s|t|re|ll|ve|d|m)\b)""")
_DIGITS: Final = re.compile(r"\d+")
_TITLE: Final = re.compile(r"<title>([^<]{1,200})</title>", re.IGNORECASE)
_TYPE: Final = re.compile(r"[A-Za-z_]{1,40}")
# Python's way to name an object in an error, with its address.
_OBJECT: Final = re.compile(r"<[^<>]* (?:at )?0x[0-9a-fA-F]+[^<>]*>|0x[0-9a-fA-F]{6,}")


def upstream_words(body: bytes | bytearray) -> str:
    """Return the upstream's own message, shortened: vLLM's `error.message`, FastAPI's `detail`, or the text itself.

    The result is valid Unicode, whatever was sent. It is for the client whose request it was, and for nobody else.
    """
    return _words_and_type(body)[0]


def shown_words(body: bytes | bytearray) -> str:
    """Return what may be logged, shown or kept of a reply's body: its type, if it has one, and the filtered words."""
    words, kind = _words_and_type(body)
    parts = [kind if _TYPE.fullmatch(kind) else "", shown(words)]
    return ": ".join(part for part in parts if part)


def shown(words: str) -> str:
    """Return what may be logged, shown or kept of an upstream's words: a known sentence, or a few of them."""
    title = _TITLE.search(words)
    text = " ".join((title[1] if title is not None else words).split())
    if _KNOWN.fullmatch(text):
        return text
    quote = _QUOTE.search(text)
    unquoted = text if quote is None else text[: quote.start()]
    plain = "".join(char for char in _DIGITS.sub("", unquoted) if char.isprintable())
    return " ".join(plain.split())[:_SHOWN_CHARS].strip()


def without_objects(text: str) -> str:
    """Return an error of a library without the objects that it names and their addresses in memory."""
    return _OBJECT.sub("...", text)


def _words_and_type(body: bytes | bytearray) -> tuple[str, str]:
    text = body[:_READ_BYTES].decode("utf-8", "replace").strip()
    try:
        words, kind = _message_in(json.loads(text))
    except (ValueError, RecursionError):
        words, kind = "", ""
    # JSON can smuggle in half a surrogate pair, which no reply could carry on.
    return (words or text)[:_MOST_CHARS].encode("utf-8", "replace").decode(), kind


def _message_in(document: object) -> tuple[str, str]:
    if not isinstance(document, dict):
        return "", ""
    error = document.get("error", document.get("detail", document.get("message")))
    if not isinstance(error, dict):
        return (error if isinstance(error, str) else ""), ""
    code, message, kind = error.get("code"), error.get("message"), error.get("type")
    # sglang's router says what happened in the code, vLLM in the message.
    words = [str(part) for part in (message, code if isinstance(code, str) else None) if part]
    return " ".join(words), kind if isinstance(kind, str) else ""
