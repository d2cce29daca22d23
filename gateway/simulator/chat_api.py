"""`/v1/chat/completions`: the same generation behind OpenAI's messages, as one document or a stream of events. Pure.

The prompt is the text of the messages, one token per byte; it does not imitate the chat template of a real model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from gateway.simulator import render as completions
from gateway.simulator import tokens as oracle
from gateway.simulator.ask import Refused, read_ask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gateway.simulator.ask import Ask, ServedModels
    from gateway.simulator.completion import Choice

END: Final = b"data: [DONE]\n\n"


def read(document: Any, served: ServedModels) -> Ask:
    """Validate the request as vLLM does. Without a limit, generation fills the context. Raises `Refused`."""
    fields = document if isinstance(document, dict) else {}
    prompt = prompt_of(fields.get("messages"))
    most = fields.get("max_completion_tokens", fields.get("max_tokens"))
    flat = {
        **fields,
        "prompt": prompt,
        "max_tokens": served.max_model_len if most is None else most,
        "logprobs": fields.get("top_logprobs", 0) if fields.get("logprobs") else None,
    }
    return read_ask(flat, served)


def prompt_of(messages: Any) -> list[int]:
    """Turn the messages into a prompt. Raises `Refused`."""
    if not isinstance(messages, list) or not messages:
        message = "'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required'"
        raise Refused(400, f"1 validation error:\n  {{{message}}}", "Bad Request", "body.messages")
    try:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    except (KeyError, TypeError) as error:
        raise Refused(400, f"a message has no {error}", "Bad Request", "body.messages") from None
    return oracle.tokens_of(text)


def wants_stream(document: Any) -> bool:
    return isinstance(document, dict) and document.get("stream") is True


def wants_usage(document: Any) -> bool:
    """Return whether a stream should end with its token usage."""
    options = document.get("stream_options") if isinstance(document, dict) else None
    return isinstance(options, dict) and options.get("include_usage") is True


def render(ask: Ask, choices: Sequence[Choice], request_id: str, created_s: int) -> bytes:
    """Return the body of a 200."""
    head = _head(ask, request_id, created_s, "chat.completion")
    written = [_choice(ask, index, choice) for index, choice in enumerate(choices)]
    return orjson.dumps({**head, "choices": written, "usage": completions.usage(ask, choices)})


def events(ask: Ask, choices: Sequence[Choice], request_id: str, created_s: int, *, usage: bool) -> Iterator[bytes]:
    """Yield the events of a 200 without `END`: the role, one event per token, and why each choice ended."""
    head = _head(ask, request_id, created_s, "chat.completion.chunk")
    for index in range(len(choices)):
        yield _event(head, [_delta(index, {"role": "assistant", "content": ""})])
    for index, choice in enumerate(choices):
        for token in choice.tokens.tolist():
            piece = {"content": oracle.text_of(token)}
            ids = {"token_ids": [token]} if ask.return_token_ids else {}
            yield _event(head, [_delta(index, piece) | ids])
        yield _event(head, [_delta(index, {}) | _ending(choice)])
    if usage:
        yield _event({**head, "usage": completions.usage(ask, choices)}, [])


def _head(ask: Ask, request_id: str, created_s: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{request_id}", "object": kind, "created": created_s, "model": ask.model}


def _choice(ask: Ask, index: int, choice: Choice) -> dict[str, Any]:
    ids = choice.tokens.tolist()
    return {
        "index": index,
        "message": {"role": "assistant", "content": completions.text(choice), "tool_calls": []},
        "logprobs": {"content": _content(ask, ids, choice)} if ask.logprobs is not None else None,
        "token_ids": ids if ask.return_token_ids else None,
        **_ending(choice),
    }


def _content(ask: Ask, ids: Sequence[int], choice: Choice) -> list[dict[str, Any]]:
    """Return an entry per token, with the requested number of alternatives; as in vLLM, the sampled token is first."""
    values = choice.logprobs.tolist()
    content = []
    for token, value, ranked in zip(ids, values, completions.ranked(ask, choice, ids, values), strict=True):
        # A dict keeps the sampled token once if it is also among the best.
        top = list({token: value, **dict(ranked)}.items())[: ask.logprobs or 0]
        content.append({**_entry(token, value), "top_logprobs": [_entry(*pair) for pair in top]})
    return content


def _entry(token: int, logprob: float) -> dict[str, Any]:
    text = oracle.text_of(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _ending(choice: Choice) -> dict[str, Any]:
    return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}


def _delta(index: int, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _event(head: dict[str, Any], choices: list[dict[str, Any]]) -> bytes:
    return b"data: " + orjson.dumps({**head, "choices": choices}) + b"\n\n"
