"""Spoil a good reply in ways that real servers and proxies have shown. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import orjson

from gateway.simulator.http import HttpReply, head_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.simulator.faults import ScriptedFault

_HTML: Final = b"<html><body><h1>It works!</h1></body></html>"


def spoil(reply: HttpReply, fault: ScriptedFault | None) -> HttpReply:
    """Return `reply` as the fault changes it; other kinds of faults do not change it."""
    if fault is None:
        return reply
    head_bytes = len(head_of(reply, keep_alive=True))
    match fault.kind:
        case "reset_after_headers":
            return replace(reply, cut_at=head_bytes)
        case "reset_in_body":
            return replace(reply, cut_at=head_bytes + len(reply.body) // 2)
        case "html":
            return replace(reply, body=_HTML, content_type="text/html")
        case "empty":
            return replace(reply, body=b"")
        case "nan" if b'"token_logprobs"' in reply.body:
            return replace(reply, body=reply.body.replace(b'"token_logprobs":[', b'"token_logprobs":[NaN,', 1))
        case "error_in_200":
            return replace(reply, body=b'{"error":{"message":"something broke","type":"InternalServerError"}}')
    edit = _EDITS.get(fault.kind)
    if edit is None:
        return reply
    document = orjson.loads(reply.body)
    edit(document, fault)
    return replace(reply, body=orjson.dumps(document))


def _abort(document: dict[str, Any], fault: ScriptedFault) -> None:
    """Keep only some of the tokens, as the 200 of a draining or paused engine does."""
    kept = int(fault.options.get("tokens", 0))
    made = 0
    for choice in document["choices"]:
        choice["finish_reason"], choice["stop_reason"] = "abort", None
        for holder, name in _per_token(choice):
            holder[name] = holder[name][:kept]
            made = max(made, len(holder[name]))
    usage = document["usage"]
    usage["completion_tokens"] = made * len(document["choices"])
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]


def _per_token(choice: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return (container, key) of every list in a choice that has one entry per token."""
    logprobs = choice["logprobs"] or {}
    return [(logprobs, name) for name in logprobs] + ([(choice, "token_ids")] if choice["token_ids"] else [])


def _null_logprobs(document: dict[str, Any], fault: ScriptedFault) -> None:
    for choice in document["choices"]:
        scored = choice["logprobs"] or {}
        if "content" in scored:
            scored["content"][-1]["logprob"] = None
        elif scored:
            scored["token_logprobs"][-1] = None


def _nan(document: dict[str, Any], fault: ScriptedFault) -> None:
    """Replace logprobs in a reply of `/inference/v1/generate`, where vLLM writes -9999 for NaN."""
    for choice in document["choices"]:
        for entry in (choice["logprobs"] or {}).get("content", ()):
            entry["logprob"] = -9999.0


def _weights_changed(document: dict[str, Any], fault: ScriptedFault) -> None:
    """Report other weights from the middle of each choice on; only `/inference/v1/generate` has that field."""
    before, after = fault.options.get("versions", ("default", "next"))
    for choice in document["choices"]:
        if "weight_versions" in choice:
            tokens = len(choice["token_ids"])
            spans = [(before, 0, tokens // 2), (after, tokens // 2, tokens)]
            choice["weight_versions"] = [{"version": name, "start": a, "end": b} for name, a, b in spans]


def _missing_choices(document: dict[str, Any], fault: ScriptedFault) -> None:
    document["choices"] = document["choices"][:-1]


def _wrong_lengths(document: dict[str, Any], fault: ScriptedFault) -> None:
    if logprobs := document["choices"][0]["logprobs"]:
        logprobs["content" if "content" in logprobs else "token_logprobs"].pop()


def _bad_token(document: dict[str, Any], fault: ScriptedFault) -> None:
    if token_ids := document["choices"][0]["token_ids"]:
        token_ids[0] = fault.options.get("value", 2**40)


_EDITS: Final[dict[str, Callable[[dict[str, Any], ScriptedFault], None]]] = {
    "abort": _abort,
    "null_logprobs": _null_logprobs,
    "nan": _nan,
    "weights_changed": _weights_changed,
    "missing_choices": _missing_choices,
    "wrong_lengths": _wrong_lengths,
    "bad_token": _bad_token,
}
