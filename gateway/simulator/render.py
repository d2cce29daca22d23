"""Write completions, models and metrics as vLLM 0.32 does, with every key in its order. Pure."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import orjson

from gateway.simulator import tokens as oracle

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gateway.simulator.ask import Ask, ServedModels
    from gateway.simulator.completion import Choice
    from gateway.simulator.stats import Stats


def completion(ask: Ask, choices: Sequence[Choice], request_id: str, created_s: int) -> bytes:
    """Return the body of a 200 to `/v1/completions`."""
    return dumps(
        {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": created_s,
            "model": ask.model,
            "choices": [_choice(ask, index, choice) for index, choice in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": "vllm-0.32.0-simulated",
            "usage": usage(ask, choices),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )


def dumps(document: Any) -> bytes:
    """Encode as JSON, with numpy arrays as lists."""
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def usage(ask: Ask, choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the token usage; the prompt counts once, however many choices there are."""
    made = sum(len(choice.tokens) for choice in choices)
    return {
        "prompt_tokens": len(ask.prompt),
        "total_tokens": len(ask.prompt) + made,
        "completion_tokens": made,
        "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": None, "multimodal_tokens": None},
        "completion_tokens_details": None,
    }


def _choice(ask: Ask, index: int, choice: Choice) -> dict[str, Any]:
    ids = choice.tokens.tolist()
    known = _texts()
    texts = [known[token] for token in ids]
    return {
        "index": index,
        "text": _text(texts, choice),
        "logprobs": _logprobs(ask, choice, ids, texts) if ask.logprobs is not None else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": ids if ask.return_token_ids else None,
        "prompt_logprobs": prompt_logprobs(ask) if ask.prompt_logprobs is not None else None,
        "prompt_token_ids": ask.prompt if ask.return_token_ids else None,
        "routed_experts": None,
    }


@cache
def _texts() -> tuple[str, ...]:
    """Return the text of every token. The table takes 2 MB and halves the time of building the same strings anew."""
    return tuple(oracle.text_of(token) for token in range(oracle.VOCAB))


@cache
def _names() -> tuple[str, ...]:
    return tuple(f"token_id:{token}" for token in range(oracle.VOCAB))


def text(choice: Choice) -> str:
    """Return the text of a sequence."""
    known = _texts()
    return _text([known[token] for token in choice.tokens.tolist()], choice)


def _text(texts: list[str], choice: Choice) -> str:
    """Join the texts up to the stop string; a stop token's text is left out too."""
    if choice.finish_reason != "stop":
        return "".join(texts)
    if isinstance(choice.stop_reason, str):
        return "".join(texts).partition(choice.stop_reason)[0]
    return "".join(texts[:-1])


def _logprobs(ask: Ask, choice: Choice, ids: list[int], texts: list[str]) -> dict[str, Any]:
    # float32 widened to double, as in vLLM.
    values = choice.logprobs.tolist()
    known = _names()
    names = [known[token] for token in ids] if ask.tokens_as_ids else texts
    return {
        "text_offset": [0, *accumulate(map(len, names))][:-1],
        "token_logprobs": values,
        "tokens": names,
        "top_logprobs": _top(ask, choice, ids, values, names),
    }


def _top(ask: Ask, choice: Choice, ids: list[int], values: list[float], names: list[str]) -> list[dict[str, float]]:
    """Return the sampled token first, then ranks 1..k. As in vLLM, tokens of equal text share one key."""
    if not ask.logprobs:
        return [{name: value} for name, value in zip(names, values, strict=True)]
    rows = []
    for value, name, best in zip(values, names, ranked(ask, choice, ids, values), strict=True):
        row = {name: value}
        for other, logprob in best:
            row.setdefault(f"token_id:{other}" if ask.tokens_as_ids else oracle.text_of(other), logprob)
        rows.append(row)
    return rows


def ranked(ask: Ask, choice: Choice, ids: Sequence[int], values: Sequence[float]) -> Iterator[list[tuple[int, float]]]:
    """Yield for each position the best tokens with their logprobs, as many as were requested."""
    k = ask.logprobs or 0
    others, theirs = oracle.alternatives(ask.model, ask.prompt, choice.seed, len(ids), k)
    theirs = oracle.reported(theirs, ask.temperature) if choice.scaled else theirs
    for at, (token, value) in enumerate(zip(ids, values, strict=True)):
        yield oracle.best(token, value, others[at], theirs[at], k)


def prompt_logprobs(ask: Ask) -> list[dict[str, Any] | None]:
    """Return for each position the actual token first, then ranks 1..k; the first position has None."""
    own = oracle.prompt_logprobs(ask.model, ask.prompt).tolist()
    k = ask.prompt_logprobs or 0
    others, theirs = oracle.prompt_alternatives(ask.model, ask.prompt, max(k, 1))
    rows: list[dict[str, Any] | None] = [None]
    for at in range(1, len(own)):
        token, value = int(ask.prompt[at]), own[at]
        ranked = oracle.best(token, value, others[at], theirs[at], k) if k else []
        # Below all drawn alternatives, the true rank is not known.
        row = {str(token): _entry(token, value, 1 + sum(other > value for other in theirs[at].tolist()))}
        for rank, (other, logprob) in enumerate(ranked, 1):
            if other == token:
                row[str(token)]["rank"] = rank
            else:
                row[str(other)] = _entry(other, logprob, rank)
        rows.append(row)
    return rows


def _entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": oracle.text_of(token)}


def models(served: ServedModels, paths: Mapping[str, str], created_s: int) -> dict[str, Any]:
    """Return the document of `/v1/models`. `paths` maps each adapter, all of the first model, to its path."""
    cards = [_card(name, name, None, served.max_model_len, created_s) for name in served.models]
    cards += [_card(name, path, served.models[0], None, created_s) for name, path in paths.items()]
    return {"object": "list", "data": cards}


def _card(name: str, root: str, parent: str | None, max_model_len: int | None, created_s: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [
            {
                "id": "modelperm-0000000000000000",
                "object": "model_permission",
                "created": created_s,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }


def metrics(model: str, stats: Stats) -> str:
    """Write the vLLM metrics that routers use."""
    labels = f'engine="0",model_name="{model}"'
    lines = [
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{labels}}} {stats.in_flight:.1f}",
        "# TYPE vllm:num_requests_waiting gauge",
        f"vllm:num_requests_waiting{{{labels}}} {stats.waiting:.1f}",
        "# TYPE vllm:kv_cache_usage_perc gauge",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.0",
        "# TYPE vllm:request_success_total counter",
        f'vllm:request_success_total{{{labels},finished_reason="length"}} {stats.completed:.1f}',
    ]
    return "\n".join(lines) + "\n"
