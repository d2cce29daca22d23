"""What can go wrong with one upstream attempt, as a small closed set.

How an HTTP reply or a broken connection becomes one of these is decided in `classify_*` below, row by row as in
docs/architecture.md; what is then done about it is decided in `retry.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final

from shared.core.model import Category
from shared.core.result import LARGEST_RESULT_BYTES
from shared.core.upstream_protocol import UpstreamProtocol
from shared.core.upstream_text import shown, shown_words, upstream_words, without_objects

if TYPE_CHECKING:
    from collections.abc import Mapping


class FaultClass(Enum):
    NEVER_EXECUTED = "never_executed"  # safe to send again
    INTERRUPTED = "interrupted"  # began, perhaps; a bounded number of executions more
    ABORTED = "aborted"  # the engine gave it up (200 "abort"); bounded more generously
    WRONG_REPLY = "wrong_reply"  # another request's, or no possible one; a bounded number of executions more
    AMBIGUOUS = "ambiguous"  # may have run to its end; final unless --retry-ambiguous
    REFUSED = "refused"  # the request itself is at fault; final


@dataclass(frozen=True, slots=True)
class Fault:
    """One failed attempt.

    `message` is for the client whose request it was, with the upstream's own words, shortened, and without addresses.
    `log_text` is for everybody else, see `for_operators`. `upstream_down`: rest this
    upstream before it is chosen again (busy is not broken: 4xx, 429 and slowness never set it). `model_missing`: this
    upstream does not have the model. `generate_missing`: it does not have the endpoint for generations. `invalid`:
    it has refused the request before anything ran. `wait_s`: NEVER_EXECUTED, and not to be waited for longer than this.
    """

    kind: FaultClass
    message: str
    category: Category = Category.SERVER
    retry_after_s: float | None = None
    upstream_down: bool = False
    model_missing: bool = False
    generate_missing: bool = False
    invalid: bool = False
    wait_s: float | None = None
    log_text: str = ""

    @property
    def for_operators(self) -> str:
        """Return what may be logged, shown or kept: no words of the upstream's that could quote a prompt."""
        return self.log_text or shown(self.message)


class BreakKind(Enum):
    """Ways in which an exchange ends without a whole reply; the forwarder maps its library's exceptions to these."""

    CONNECT_REFUSED = "connection refused"
    DNS = "name not resolved"
    CONNECT_TIMEOUT = "connection not accepted in time"
    TLS = "TLS failed"
    CLOSED_BEFORE_WRITE = "connection was closed before the request was written"
    RESET_BEFORE_STATUS = "connection closed before a reply"
    READ_TIMEOUT = "no reply in time"
    BODY_CUT = "reply was cut"
    NOT_HTTP = "what it answered is not HTTP"
    ANOTHERS_REPLY = "the reply is not the one to this request"
    DRAINING = "upstream takes no new connections and answers no old ones"


# Whether it may have executed, and whether the upstream is broken (and not just slow).
_BREAKS: Final[dict[BreakKind, tuple[FaultClass, bool]]] = {
    BreakKind.CONNECT_REFUSED: (FaultClass.NEVER_EXECUTED, True),
    BreakKind.DNS: (FaultClass.NEVER_EXECUTED, True),
    BreakKind.CONNECT_TIMEOUT: (FaultClass.NEVER_EXECUTED, True),
    BreakKind.TLS: (FaultClass.NEVER_EXECUTED, True),
    BreakKind.CLOSED_BEFORE_WRITE: (FaultClass.NEVER_EXECUTED, False),
    # vLLM aborts within 65 ms of a close, so a second execution never runs beside the first.
    BreakKind.RESET_BEFORE_STATUS: (FaultClass.INTERRUPTED, True),
    BreakKind.DRAINING: (FaultClass.INTERRUPTED, True),
    BreakKind.READ_TIMEOUT: (FaultClass.AMBIGUOUS, False),
    BreakKind.BODY_CUT: (FaultClass.AMBIGUOUS, False),
    BreakKind.NOT_HTTP: (FaultClass.AMBIGUOUS, False),
    BreakKind.ANOTHERS_REPLY: (FaultClass.WRONG_REPLY, False),
}

# What a library reports of these may repeat bytes that the upstream sent.
_QUOTING: Final = frozenset({BreakKind.NOT_HTTP, BreakKind.BODY_CUT})
_MESSAGE_CHARS: Final = 500
# Longer than any router asks for; a typing error in one must not hold samples for a day.
_LONGEST_RETRY_AFTER_S: Final = 600.0
_LOADED_BEFORE: Final = "has already been loaded"
_NOT_ENABLED: Final = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 to have adapters loaded"
_NAN: Final = "Out of range float values are not JSON compliant"
_ENGINE_DEAD: Final = "EngineCore encountered an issue"
# A router's words for "the server behind me went away while it worked on this".
_ROUTER_LOST_IT: Final = (
    "error sending request",
    "Failed to get response body",
    "call_upstream_request_error",
    "read_response_body_failed",
)


def classify_break(kind: BreakKind, where: str = "", detail: str = "") -> Fault:
    """Return the fault of an exchange that ended without a whole reply.

    `where` (an upstream's URL) and `detail` (the system's or a library's own words) are for the log only.
    """
    fault_class, down = _BREAKS[kind]
    message = f"upstream: {kind.value}"
    known = ": ".join(part for part in (where, shown(detail) if kind in _QUOTING else without_objects(detail)) if part)
    log_text = f"{message} ({known})" if known else message
    return Fault(fault_class, message, upstream_down=down, log_text=log_text[:_MESSAGE_CHARS])


def too_large() -> Fault:
    """Return the fault of a result that is too large for any client: the same request would end in the same way."""
    limit = f"{LARGEST_RESULT_BYTES // 2**20} MiB"
    hint = "ask for fewer samples, tokens or top-k logprobs at once"
    return Fault(FaultClass.REFUSED, f"the result is larger than {limit}: {hint}", Category.USER)


def classify_reply(
    status: int,
    body: bytes | bytearray,
    headers: Mapping[str, str],
    protocol: UpstreamProtocol = UpstreamProtocol.COMPLETIONS,
) -> Fault:
    """Return the fault behind a reply that is not a 200. `protocol`: the one that was used."""
    fault = _classify_reply(status, body, headers, protocol)
    log_text = fault.log_text or f"upstream answered {status}: {shown_words(body) or 'no text that can be shown'}"
    return replace(fault, log_text=log_text)


def _classify_reply(
    status: int, body: bytes | bytearray, headers: Mapping[str, str], protocol: UpstreamProtocol
) -> Fault:
    words = upstream_words(body) or "no text"
    message = f"upstream answered {status}: {words}"
    if status in (429, 503) or (status == 408 and not body):
        return Fault(FaultClass.NEVER_EXECUTED, message, retry_after_s=_retry_after_s(headers))
    if status >= 500:
        return _classify_5xx(status, words, message)
    if status >= 400:
        return _classify_refusal(status, body, message, protocol)
    if status >= 300:
        hint = "give --upstream the address that it redirects to"
        return Fault(FaultClass.REFUSED, f"upstream answered {status}: {hint}")
    return Fault(FaultClass.AMBIGUOUS, message)


def _classify_5xx(status: int, words: str, message: str) -> Fault:
    if status == 500 and _ENGINE_DEAD in words:
        return Fault(FaultClass.INTERRUPTED, message, upstream_down=True)
    if status == 500 and any(text in words for text in _ROUTER_LOST_IT):
        # The router itself is well: another of its servers may answer.
        return Fault(FaultClass.INTERRUPTED, message)
    return Fault(FaultClass.AMBIGUOUS, message)


def _classify_refusal(status: int, body: bytes | bytearray, message: str, protocol: UpstreamProtocol) -> Fault:
    """Blame a 4xx on the user, unless only the operator can fix it or the model is broken."""
    if status == 400 and _NAN in message:
        return Fault(FaultClass.REFUSED, f"{message} (the model computes NaN: bad weights or adapter)")
    if status in (401, 403) or (status in (404, 405) and b'"error"' not in body):
        return _operators_matter(status, protocol)
    if status == 408:
        # With words of its own it is some proxy's deadline, not a router's queue: it may have run.
        return Fault(FaultClass.AMBIGUOUS, message)
    return Fault(FaultClass.REFUSED, message, Category.USER, model_missing=status == 404, invalid=status in (400, 422))


def _operators_matter(status: int, protocol: UpstreamProtocol) -> Fault:
    """No key, or no such endpoint: vLLM answers 403 to generations for either."""
    hints = ["the gateway's operator must set --upstream-api-key-file"] if status in (401, 403) else []
    missing = protocol is UpstreamProtocol.GENERATE and status != 401
    if missing:
        hints.append(
            f"{protocol.path} needs vLLM's --enable-scale-out, or give --upstream-protocol completions or auto"
        )
    elif not hints:
        hints.append(f"there is no {protocol.path}; is --upstream a vLLM server?")
    message = f"upstream answered {status}: {'; or '.join(hints)}"
    return Fault(FaultClass.REFUSED, message, generate_missing=missing, log_text=message)


def classify_load(status: int, body: bytes, path: str, wait_s: float) -> Fault | None:
    """Return the fault behind an upstream's answer to loading the adapter of `path`; None if it has the adapter.

    Nothing of a sample was executed. `wait_s`: how long to try again if the upstream refuses.
    """
    words = upstream_words(body)
    if status == 200 or (status == 400 and _LOADED_BEFORE in words):
        return None
    if status in (429, 503):
        busy = classify_reply(status, body, {})
        return replace(busy, message=busy.log_text)
    # What the client named is not there; any other trouble is for the operator.
    category = Category.USER if status == 404 else Category.SERVER
    if status in (404, 405) and b'"error"' not in body:
        words, category = _NOT_ENABLED, Category.SERVER
    else:
        # Kept for a while, for everybody who uses the adapter.
        words = shown_words(body)
    message = f"adapter {path}: upstream answered {status}: {words}"
    return Fault(FaultClass.NEVER_EXECUTED, message, category, wait_s=wait_s)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds of a `Retry-After` header; the date form is not used by any upstream that is known."""
    text = next((value for name, value in headers.items() if name.lower() == "retry-after"), "")
    try:
        seconds = float(text)
    except ValueError:
        return None
    return min(seconds, _LONGEST_RETRY_AFTER_S) if seconds >= 0 else None
