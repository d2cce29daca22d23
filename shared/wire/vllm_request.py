"""A sample as vLLM's `/v1/completions` wants it asked, token in and token out.

What the requests look like, and why (docs/upstream.md has the evidence):

- `logprobs: 0` is the sampled token's alone: 67 bytes a token instead of 117 and more. `return_token_ids` gives
  integers; with a top-k, `return_tokens_as_token_ids` keeps its keys apart, which as text would collapse.
- Every sampling parameter is sent. One that is left out takes the model's own default (generation_config.json), which
  the SDK's user has not asked for.
- `max_tokens` is always sent: vLLM reads its absence as 16, the SDK's user means "as much as fits".
- Greedy sampling of n sequences is refused by vLLM; it is one sequence, n times.
- Prompt logprobs are repeated in every choice, so with n > 1 they are asked for apart, once.

The prompt is spliced in as bytes, never as a list of integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from shared.core.errors import BadRequest
from shared.core.frozen import Frozen

if TYPE_CHECKING:
    from shared.core.model import SampleSpec

PATH: Final = "/v1/completions"


class UpstreamCall(Frozen, frozen=True):
    """One POST to `PATH`, of an attempt. `sequences`: how many of its choices are kept; `scores`: the prompt's too."""

    body: bytes
    sequences: int
    scores: bool


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
    if isinstance(stop[0], str):
        # A special token (an end-of-turn mark, say) is looked for in the text too; by default vLLM leaves it out there.
        return {"stop": stop, "skip_special_tokens": False}
    return {"stop_token_ids": stop}


def _splice(prompt: bytes, fields: dict[str, Any]) -> bytes:
    return b'{"prompt":[' + prompt + b"]," + orjson.dumps(fields)[1:]
