"""`/inference/v1/generate`: the same generation in vLLM's token-in token-out format. Pure."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gateway.simulator import render as completions
from gateway.simulator import tokens as oracle
from gateway.simulator.ask import Refused, read_ask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gateway.simulator.ask import Ask, ServedModels
    from gateway.simulator.completion import Choice


def read(document: Any, served: ServedModels, max_num_seqs: int = 0) -> Ask:
    """Validate the request with vLLM's checks in vLLM's order. Raises `Refused`.

    `max_num_seqs` is the largest number of sequences per request; 0 for no limit.
    """
    _require_fields(document)
    prompt, image_spans = _expanded(document)
    flat = as_completion({**document, "token_ids": prompt}, served.max_model_len)
    ask = read_ask(flat, served, max_stop_strings=None)
    if max_num_seqs and ask.n > max_num_seqs:
        message = f"sampling_params.n must be at most the server's max_num_seqs ({max_num_seqs}), got {ask.n}."
        raise Refused(400, message)
    return replace(ask, return_prompt=bool(document.get("return_token_ids")), image_spans=tuple(image_spans))


def _expanded(document: dict[str, Any]) -> tuple[Sequence[int] | NDArray[np.int64], list[tuple[int, int]]]:
    """Return the prompt with its images expanded, and the images' spans. Nothing is fetched."""
    parts, ids = document.get("content_parts"), document["token_ids"]
    if not parts:
        return ids, []
    try:
        images = [_image(part["url"]) for part in parts if part["type"] == "image_url"]
        return oracle.expanded(ids if isinstance(ids, list) else ids.tolist(), images)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Refused(400, f"Failed to apply prompt replacement for mm_items: {error}") from None


def _image(url: str) -> bytes:
    head, _, data = url.partition(";base64,")
    if not head.startswith("data:image/"):
        raise ValueError("only data URLs of images are supported here")
    return base64.b64decode(data, validate=True)


def _require_fields(document: Any) -> None:
    """Refuse a document without a required field, with the message of the web framework in front of vLLM."""
    fields = document if isinstance(document, dict) else {}
    for name, kind in (("token_ids", (list, np.ndarray)), ("sampling_params", dict)):
        if not isinstance(fields.get(name), kind):
            loc = f"body.{name}"
            message = f"'type': 'missing', 'loc': '{loc}', 'msg': 'Field required'"
            raise Refused(400, f"1 validation error:\n  {{{message}}}", "Bad Request", loc)


def as_completion(document: Any, max_model_len: int) -> Any:
    """Convert the request to the form of `/v1/completions`, with the parameters beside the prompt.

    A missing or larger `max_tokens` means up to the end of the context.
    """
    flat = dict(document["sampling_params"])
    wanted = flat.get("max_tokens")
    flat["max_tokens"] = min(wanted, max_model_len) if type(wanted) is int else wanted or max_model_len
    return {**flat, "model": document.get("model"), "prompt": document["token_ids"], "return_token_ids": True}


def render(ask: Ask, choices: Sequence[Choice], request_id: str, created_s: int) -> bytes:
    spans = [{"offset": offset, "length": length} for offset, length in ask.image_spans]
    return completions.dumps(
        {
            "request_id": f"generate-tokens-{request_id}",
            "model": ask.model,
            "created": created_s,
            "usage": completions.usage(ask, choices),
            "prompt_logprobs": completions.prompt_logprobs(ask) if ask.prompt_logprobs is not None else None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": ask.prompt if ask.return_prompt else None,
            "mm_placeholders": {"image": spans} if spans and ask.return_prompt else None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": [_choice(ask, index, choice) for index, choice in enumerate(choices)],
        }
    )


def _choice(ask: Ask, index: int, choice: Choice) -> dict[str, Any]:
    ids = choice.tokens.tolist()
    return {
        "index": index,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
        "logprobs": {"content": _content(ask, choice, ids)} if ask.logprobs is not None else None,
    }


def _content(ask: Ask, choice: Choice, ids: list[int]) -> list[dict[str, Any]]:
    values = choice.logprobs.tolist()
    ranked_rows = (
        completions.ranked(ask, choice, ids, values) if ask.logprobs and ask.logprobs > 1 else ([] for _ in ids)
    )
    content = []
    for token, value, ranked in zip(ids, values, ranked_rows, strict=True):
        own = _entry(token, value, 1 + sum(other > value for _, other in ranked))
        others = [_entry(one, other, rank) for rank, (one, other) in enumerate(ranked, 1) if one != token]
        # The sampled token counts as one of the k and comes first.
        content.append({**own, "top_logprobs": [own, *others][: max(ask.logprobs or 0, 1)]})
    return content


def _entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"token_id": token, "logprob": logprob, "rank": rank}
