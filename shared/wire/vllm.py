"""A sample as vLLM's `/v1/completions` wants it asked, and what it answers, token in and token out.

What the requests look like, and why (docs/upstream.md has the evidence):

- `logprobs: 0` is the sampled token's alone: 67 bytes a token instead of 117 and more. `return_token_ids` gives integers;
  with a top-k, `return_tokens_as_token_ids` keeps its keys apart, which as text would collapse.
- Every sampling parameter is sent. One that is left out takes the model's own default (generation_config.json), which
  the SDK's user has not asked for.
- `max_tokens` is always sent: vLLM reads its absence as 16, the SDK's user means "as much as fits".
- Greedy sampling of n sequences is refused by vLLM; it is one sequence, n times.
- Prompt logprobs are repeated in every choice, so with n > 1 they are asked for apart, once.

The prompt is spliced in as bytes; replies are read by pysimdjson's buffers into numpy. Neither makes an object per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

from shared.core.errors import BadRequest
from shared.core.faults import Fault, FaultClass
from shared.core.result import PromptScores, SampleResult, SequenceResult, StopReason, TopK
from shared.wire import document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shared.core.model import SampleSpec
    from shared.wire.document import Value

_INT32_MAX: Final = 2**31 - 1
_EMPTY_LOGPROB: Final = -99999.0
_TOKEN_KEY: Final = "token_id:"
_STOP_REASONS: Final = {
    "stop": StopReason.STOP,
    "length": StopReason.LENGTH,
    # vLLM's own detector of endless repetition ended it: it will not go on.
    "repetition": StopReason.STOP,
}


@dataclass(frozen=True, slots=True)
class UpstreamCall:
    """One request of an attempt. `sequences`: how many of its choices are wanted; `scores`: the prompt's scores too."""

    body: bytes = field(repr=False)
    sequences: int
    scores: bool


@dataclass(frozen=True, slots=True)
class Decoded:
    sequences: tuple[SequenceResult, ...]
    scores: PromptScores | None
    cached_tokens: int


class ReplyError(ValueError):
    """A 200 that is not a result; the text says what was wrong."""


class _Aborted(Exception):
    """The engine gave the request up. `tokens`: how many it had made."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens


# -- asking -----------------------------------------------------------------------------------------------------


def room(spec: SampleSpec, context_tokens: int | None) -> int:
    """How many tokens to ask for: as many as wanted and as the context leaves.

    Raises `BadRequest` when the prompt leaves nothing, in the words that users of the hosted service match on.
    """
    wanted = spec.params.max_tokens
    if context_tokens is None:
        if wanted is None:
            raise BadRequest("max_tokens is needed: the upstream does not tell how long its context is")
        return wanted
    left = context_tokens - spec.prompt_tokens
    if left < 1:
        raise BadRequest(
            "Prompt length plus max_tokens exceeds the model's context window: "
            f"{spec.prompt_tokens} + {wanted or 1} > {context_tokens}"
        )
    return left if wanted is None else min(wanted, left)


def plan_calls(spec: SampleSpec, model: str, context_tokens: int | None) -> list[UpstreamCall]:
    """The requests of one attempt, the prompt's scores first where they are asked apart. Raises as `room` does."""
    max_tokens = room(spec, context_tokens)
    choices = _distinct_choices(spec)
    apart = spec.wants_prompt_scores and choices > 1
    together = spec.wants_prompt_scores and not apart
    calls = [UpstreamCall(_scores_body(spec, model), 0, True)] if apart else []
    calls.append(UpstreamCall(_sample_body(spec, model, max_tokens, choices, together), choices, together))
    return calls


def _distinct_choices(spec: SampleSpec) -> int:
    return 1 if spec.params.temperature == 0.0 else spec.num_samples


def _sample_body(spec: SampleSpec, model: str, max_tokens: int, choices: int, scores: bool) -> bytes:
    params = spec.params
    fields: dict[str, Any] = {
        **_fixed(model),
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "n": choices,
        "logprobs": spec.topk_sample_logprobs,
    }
    if params.seed is not None:
        fields["seed"] = params.seed
    fields.update(_stop_fields(spec))
    if spec.topk_sample_logprobs:
        fields["return_tokens_as_token_ids"] = True
    if scores:
        fields["prompt_logprobs"] = spec.topk_prompt_logprobs
    return _splice(spec.prompt, fields)


def _scores_body(spec: SampleSpec, model: str) -> bytes:
    fields = {
        **_fixed(model),
        "max_tokens": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "n": 1,
        "logprobs": 0,
        "prompt_logprobs": spec.topk_prompt_logprobs,
    }
    return _splice(spec.prompt, fields)


def _fixed(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
    }


def _stop_fields(spec: SampleSpec) -> dict[str, Any]:
    stop = spec.params.stop
    if stop is None:
        return {}
    if not stop:
        return {"ignore_eos": True}
    return {"stop" if isinstance(stop[0], str) else "stop_token_ids": stop}


def _splice(prompt: bytes, fields: dict[str, Any]) -> bytes:
    return b'{"prompt":[' + prompt + b"]," + orjson.dumps(fields)[1:]


# -- reading ----------------------------------------------------------------------------------------------------


def decode_reply(call: UpstreamCall, spec: SampleSpec, body: bytes) -> Decoded | Fault:
    """The sequences and scores in the body of a 200, or why it is no result.

    Nothing is made up: a count, a length or a value that does not fit is an AMBIGUOUS fault that names both sides. An
    engine that gave up is ABORTED, or NEVER_EXECUTED when it had not made a token (it drains or is paused).
    """
    try:
        return _decode(call, spec, document.load(body))
    except _Aborted as aborted:
        kind = FaultClass.ABORTED if aborted.tokens else FaultClass.NEVER_EXECUTED
        return Fault(kind, f"the engine aborted the request after {aborted.tokens} tokens")
    except ReplyError as error:
        return Fault(FaultClass.AMBIGUOUS, f"upstream answered 200, but {error}")
    except document.UNREADABLE as error:
        words = body[:120].decode("utf-8", "replace")
        return Fault(FaultClass.AMBIGUOUS, f"upstream answered 200 with what is no completion ({error}): {words}"[:500])


def _decode(call: UpstreamCall, spec: SampleSpec, reply: Value) -> Decoded:
    choices = reply["choices"]
    _refuse_aborted(choices)
    wanted = max(call.sequences, 1)
    if len(choices) != wanted:
        raise ReplyError(f"with {len(choices)} choices where {wanted} were asked for")
    by_index = sorted((choice["index"], place) for place, choice in enumerate(choices))
    if [index for index, _ in by_index] != list(range(wanted)):
        raise ReplyError(f"its choices are numbered {[index for index, _ in by_index]}")
    sequences = tuple(_sequence(spec, choices[place]) for _, place in by_index) if call.sequences else ()
    scores = _prompt_scores(spec, choices[by_index[0][1]].get("prompt_logprobs")) if call.scores else None
    return Decoded(sequences, scores, _cached_tokens(reply))


def _refuse_aborted(choices: Value) -> None:
    """One aborted choice spoils the request: the others belong to the same weights and the same promise."""
    aborted = [choice for choice in choices if choice["finish_reason"] == "abort"]
    if aborted:
        raise _Aborted(sum(len(choice.get("token_ids") or ()) for choice in choices))


def _sequence(spec: SampleSpec, choice: Value) -> SequenceResult:
    finish_reason = choice["finish_reason"]
    if finish_reason not in _STOP_REASONS:
        raise ReplyError(f"finish_reason is {finish_reason!r}")
    scored = choice["logprobs"]
    if scored is None:
        raise ReplyError("without logprobs")
    tokens = _token_ids(choice.get("token_ids"), scored)
    logprobs = _logprobs(scored["token_logprobs"])
    if len(tokens) != len(logprobs):
        raise ReplyError(f"with {len(tokens)} tokens and {len(logprobs)} logprobs")
    topk = _sampled_topk(scored["top_logprobs"], spec.topk_sample_logprobs, len(tokens))
    return SequenceResult(
        tokens.astype("<i4").tobytes(), logprobs.astype("<f4").tobytes(), _STOP_REASONS[finish_reason], topk
    )


def _token_ids(token_ids: Value, scored: Value) -> NDArray[np.int64]:
    """vLLM before `return_token_ids` tells the ids as `token_id:N` texts only."""
    if token_ids is None:
        return np.array([_id_of(text) for text in document.plain(scored["tokens"])], np.int64)
    try:
        ids = document.integers(token_ids)
    except document.UNREADABLE as error:
        raise ReplyError(f"its token ids are not all integers ({error})") from None
    if len(ids) and not (0 <= ids.min() and ids.max() <= _INT32_MAX):
        raise ReplyError(f"a token id is not a non-negative 32-bit integer: {ids.min()} .. {ids.max()}")
    return ids


def _logprobs(values: Value) -> NDArray[np.float64]:
    try:
        return document.floats(values)
    except document.UNREADABLE as error:
        raise ReplyError(f"its logprobs are not all numbers ({error})") from None


def _sampled_topk(rows: Value, k: int, tokens: int) -> TopK | None:
    if not k:
        return None
    found = document.plain(rows)
    if len(found) != tokens:
        raise ReplyError(f"with {tokens} tokens and {len(found)} rows of top logprobs")
    return _topk([_best(row, k) for row in found], k)


def _best(row: dict[str, float], k: int) -> list[tuple[int, float]]:
    """The k best of a row that may hold the sampled token as one more."""
    pairs = [(_id_of(key), value) for key, value in row.items()]
    return sorted(pairs, key=lambda pair: -pair[1])[:k]


def _id_of(text: Any) -> int:
    if not isinstance(text, str) or not text.startswith(_TOKEN_KEY) or not text[len(_TOKEN_KEY) :].isdecimal():
        raise ReplyError(f"a token is told as {str(text)[:20]!r} instead of by its id")
    return _checked(int(text[len(_TOKEN_KEY) :]))


def _checked(token_id: int) -> int:
    if token_id > _INT32_MAX:
        raise ReplyError(f"a token id is not a non-negative 32-bit integer: {token_id}")
    return token_id


def _topk(rows: Sequence[Sequence[tuple[int, float]]], k: int) -> TopK:
    """Rows of at most k pairs, padded as the SDK reads them."""
    ids = np.zeros((len(rows), k), "<i4")
    logprobs = np.full((len(rows), k), _EMPTY_LOGPROB, "<f4")
    for place, row in enumerate(rows):
        for rank, (token_id, value) in enumerate(row):
            ids[place, rank] = token_id
            logprobs[place, rank] = value
    return TopK(ids.tobytes(), logprobs.tobytes(), k, len(rows))


def _prompt_scores(spec: SampleSpec, told: Value) -> PromptScores:
    rows = document.plain(told) if told is not None else None
    if rows is None or len(rows) != spec.prompt_tokens:
        count = "no" if rows is None else len(rows)
        raise ReplyError(f"with {count} prompt logprobs for {spec.prompt_tokens} prompt tokens")
    first = spec.prompt_tokens - spec.prompt_logprobs_last_n if spec.prompt_logprobs_last_n is not None else 1
    kept = [row if place >= first else None for place, row in enumerate(rows)]
    logprobs = _own_logprobs(spec, kept) if spec.prompt_logprobs else None
    k = spec.topk_prompt_logprobs
    return PromptScores(logprobs, _topk([_ranked(row, k) for row in kept], k) if k else None)


def _own_logprobs(spec: SampleSpec, rows: Sequence[dict[str, Any] | None]) -> bytes:
    """Each prompt token's own logprob, found by its id: the order within a row is not a promise."""
    values = np.full(len(rows), np.nan, "<f4")
    for place, (token, row) in enumerate(zip(spec.prompt.split(b","), rows, strict=True)):
        if row is not None:
            values[place] = _entry(row, token.decode())["logprob"]
    return values.tobytes()


def _entry(row: dict[str, Any], token: str) -> dict[str, Any]:
    entry = row.get(token)
    if not isinstance(entry, dict) or not isinstance(entry.get("logprob"), int | float):
        raise ReplyError(f"the logprob of prompt token {token} is missing")
    return entry


def _ranked(row: dict[str, Any] | None, k: int) -> list[tuple[int, float]]:
    if row is None:
        return []
    ranked = sorted(row.items(), key=lambda item: item[1]["rank"])
    return [(_checked(int(token)), entry["logprob"]) for token, entry in ranked if entry["rank"] <= k]


def _cached_tokens(reply: Value) -> int:
    """An older vLLM, or one without --enable-prompt-tokens-details, does not tell."""
    usage = reply.get("usage")
    details = usage.get("prompt_tokens_details") if usage is not None else None
    cached = details.get("cached_tokens") if details is not None else None
    return cached if isinstance(cached, int) else 0


def combine(spec: SampleSpec, decoded: Sequence[Decoded]) -> SampleResult:
    """All replies of an attempt as one result, with as many sequences as were promised."""
    sequences = tuple(sequence for part in decoded for sequence in part.sequences)
    if len(sequences) == 1 < spec.num_samples:
        sequences *= spec.num_samples
    scores = next((part.scores for part in decoded if part.scores is not None), None)
    return SampleResult(sequences, scores, decoded[-1].cached_tokens)
