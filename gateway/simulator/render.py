"""A completion as vLLM 0.32 writes it: every key, in its order. Pure."""

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
    """The body of a 200 to `/v1/completions`."""
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
    """With arrays as lists."""
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def usage(ask: Ask, choices: Sequence[Choice]) -> dict[str, Any]:
    """The prompt counts once, however many choices there are."""
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
    """Of every token: a table costs 2 MB once, and half as much time as making the same strings again and again."""
    return tuple(oracle.text_of(token) for token in range(oracle.VOCAB))


@cache
def _names() -> tuple[str, ...]:
    return tuple(f"token_id:{token}" for token in range(oracle.VOCAB))


def text(choice: Choice) -> str:
    """What a sequence says."""
    known = _texts()
    return _text([known[token] for token in choice.tokens.tolist()], choice)


def _text(texts: list[str], choice: Choice) -> str:
    """What was said before the stop string; a stop token's text is not told either."""
    if choice.finish_reason != "stop":
        return "".join(texts)
    if isinstance(choice.stop_reason, str):
        return "".join(texts).partition(choice.stop_reason)[0]
    return "".join(texts[:-1])


def _logprobs(ask: Ask, choice: Choice, ids: list[int], texts: list[str]) -> dict[str, Any]:
    # float32 widened to double, as vLLM tells them.
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
    """The sampled token first, then ranks 1..k; as text keys, equal texts collapse, which is vLLM's way."""
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
    """At each position the best tokens, with their logprobs, as many as were asked for."""
    k = ask.logprobs or 0
    others, theirs = oracle.alternatives(ask.model, ask.prompt, choice.seed, len(ids), k)
    theirs = oracle.reported(theirs, ask.temperature) if choice.scaled else theirs
    for place, (token, value) in enumerate(zip(ids, values, strict=True)):
        yield oracle.best(token, value, others[place], theirs[place], k)


def prompt_logprobs(ask: Ask) -> list[dict[str, Any] | None]:
    """The actual token first, then ranks 1..k; the first position has none."""
    own = oracle.prompt_logprobs(ask.model, ask.prompt).tolist()
    k = ask.prompt_logprobs or 0
    others, theirs = oracle.prompt_alternatives(ask.model, ask.prompt, max(k, 1))
    rows: list[dict[str, Any] | None] = [None]
    for place in range(1, len(own)):
        token, value = int(ask.prompt[place]), own[place]
        ranked = oracle.best(token, value, others[place], theirs[place], k) if k else []
        row = {str(token): _entry(token, value, _rank(value, theirs[place].tolist()))}
        for rank, (other, logprob) in enumerate(ranked, 1):
            if other == token:
                row[str(token)]["rank"] = rank
            else:
                row[str(other)] = _entry(other, logprob, rank)
        rows.append(row)
    return rows


def _rank(value: float, others: list[float]) -> int:
    """Beyond the alternatives that were drawn it is only known to be worse than they are."""
    return 1 + sum(other > value for other in others)


def _entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": oracle.text_of(token)}


def models(served: ServedModels, paths: Mapping[str, str], created_s: int) -> dict[str, Any]:
    """`/v1/models`; `paths`: adapter -> where it was loaded from. All adapters are of the first model."""
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
        "permission": [_permission(created_s)],
    }


def _permission(created_s: int) -> dict[str, Any]:
    return {
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


def metrics(model: str, stats: Stats) -> str:
    """The few of vLLM's metrics that routers look at."""
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
