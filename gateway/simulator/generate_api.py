"""`/inference/v1/generate`: the same generation, asked and answered in vLLM's token-in token-out form. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from gateway.simulator import tokens as oracle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.simulator.ask import Ask
    from gateway.simulator.completion import Choice


def as_completion(document: Any, max_model_len: int) -> Any:
    """The request as `/v1/completions` would have it: parameters beside the prompt instead of under a key.

    `max_tokens` missing means to the end of the context here.
    """
    if not isinstance(document, dict):
        return document
    parameters = document.get("sampling_params")
    flat = dict(parameters) if isinstance(parameters, dict) else {}
    if flat.get("max_tokens") is None:
        flat["max_tokens"] = max_model_len
    return {**flat, "model": document.get("model"), "prompt": document.get("token_ids"), "return_token_ids": True}


def render(ask: Ask, choices: Sequence[Choice], request_id: str, created_s: int) -> bytes:
    made = sum(len(choice.tokens) for choice in choices)
    return orjson.dumps(
        {
            "request_id": f"generate-tokens-{request_id}",
            "model": ask.model,
            "created": created_s,
            "usage": {
                "prompt_tokens": len(ask.prompt),
                "total_tokens": len(ask.prompt) + made,
                "completion_tokens": made,
                "prompt_tokens_details": {
                    "cached_tokens": 0,
                    "created_cache_tokens": None,
                    "multimodal_tokens": None,
                },
                "completion_tokens_details": None,
            },
            "prompt_logprobs": _prompt_logprobs(ask),
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": [_choice(ask, index, choice) for index, choice in enumerate(choices)],
        }
    )


def _prompt_logprobs(ask: Ask) -> list[dict[str, Any] | None] | None:
    if ask.prompt_logprobs is None:
        return None
    values = oracle.prompt_logprobs(ask.model, ask.prompt).tolist()
    pairs = list(zip(ask.prompt.tolist(), values, strict=True))
    rows: list[dict[str, Any] | None] = [None]
    rows += [{str(token): {"logprob": value, "rank": 1, "decoded_token": None}} for token, value in pairs[1:]]
    return rows


def _choice(ask: Ask, index: int, choice: Choice) -> dict[str, Any]:
    ids, values = choice.tokens.tolist(), choice.logprobs.tolist()
    content = [
        {
            "token_id": token,
            "logprob": value,
            "rank": 1,
            "top_logprobs": [{"token_id": token, "logprob": value, "rank": 1}],
        }
        for token, value in zip(ids, values, strict=True)
    ]
    return {
        "index": index,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
        "logprobs": {"content": content} if ask.logprobs is not None else None,
    }
