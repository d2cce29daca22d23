"""Bodies of any size: requests as the SDK sends them, replies in the form of a recorded one."""

from __future__ import annotations

import json
from typing import Any

from gateway.bench.load import requests
from gateway.bench.load.workload import Workload, sample
from tests.vllm_recordings import large_body

SESSION_ID = "gwss-benchmark"


def asample_body(prompt_tokens: int, max_tokens: int = 64, number: int = 0) -> bytes:
    """Return a submission as the SDK writes it; each `number` is another sample of the same client."""
    workload = Workload(seed=1, model="sim/tiny", prompt_tokens=prompt_tokens, max_tokens=max_tokens)
    return requests.asample_body(workload, sample(workload, number), SESSION_ID, number + 1)


def retrieve_future_body(number: int = 0) -> bytes:
    """Return a poll as the SDK writes it, with an id of the usual length."""
    request_id = f"gwss-{'k' * 32}.gws-{'s' * 32}.b{'m' * 24}:{number}"
    return requests.retrieve_future_body(request_id, True)


def reply_body(tokens: int) -> bytes:
    """Return a reply of `tokens` tokens: the recorded one of 16,000, cut or repeated, with all its fields."""
    reply = json.loads(large_body())
    choice, usage = reply["choices"][0], reply["usage"]
    recorded = len(choice["token_ids"])
    pieces = [min(recorded, tokens - start) for start in range(0, tokens, recorded)]
    scored = choice["logprobs"]
    for name in ("token_logprobs", "tokens", "top_logprobs"):
        scored[name] = _repeated(scored[name], pieces)
    step = scored["text_offset"][-1] + 12
    scored["text_offset"] = [
        offset + step * number for number, piece in enumerate(pieces) for offset in scored["text_offset"][:piece]
    ]
    text = choice["text"]
    choice["text"] = "".join(text[: len(text) * piece // recorded] for piece in pieces)
    choice["token_ids"] = _repeated(choice["token_ids"], pieces)
    usage["completion_tokens"] = tokens
    usage["total_tokens"] = tokens + usage["prompt_tokens"]
    return json.dumps(reply, separators=(",", ":"), ensure_ascii=False).encode()


def generation_body(tokens: int) -> bytes:
    """Return the same tokens and logprobs in the form of `/inference/v1/generate`."""
    reply = json.loads(reply_body(tokens))
    completion = reply["choices"][0]
    values = zip(completion["token_ids"], completion["logprobs"]["token_logprobs"], strict=True)
    rows = [{"token_id": token, "logprob": logprob, "rank": 1} for token, logprob in values]
    choice = {
        "index": 0,
        "finish_reason": completion["finish_reason"],
        "stop_reason": None,
        "token_ids": completion["token_ids"],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "default", "start": 0, "end": tokens}],
        "logprobs": {"content": [{**row, "top_logprobs": [row]} for row in rows]},
    }
    whole = {"request_id": "generate-tokens-1", "usage": reply["usage"], "prompt_logprobs": None, "choices": [choice]}
    return json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()


def _repeated(values: list[Any], pieces: list[int]) -> list[Any]:
    return [value for piece in pieces for value in values[:piece]]
