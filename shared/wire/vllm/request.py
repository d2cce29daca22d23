"""Write a sample as a request of either of vLLM's two endpoints, tokens in and tokens out.

How the requests look, and why (docs/upstream.md has the evidence):

- `logprobs: 0` asks for the sampled token only: 67 bytes for each token of a completion, instead of 117 or more.
- Every sampling parameter is sent. One that is left out takes the model's own default (generation_config.json), which
  the SDK's user has not asked for.
- `max_tokens` is always sent: completions read its absence as 16, the SDK's user means "as much as fits".
- Greedy sampling of n sequences is refused by vLLM; it is one sequence, n times.

`/v1/completions`: `return_token_ids` gives integers; with a top-k, `return_tokens_as_token_ids` keeps its keys apart,
which as text would collapse.

`/inference/v1/generate`: ids are integers anyway, and there is no bound on stop strings. Its `logprobs: k` counts the
sampled token as one of the k, so the k best need one more.

Prompt logprobs of several sequences are asked for apart, once: completions repeat them in every choice, and behind
either endpoint each choice computes them anew, with a full prefill of its own.

The prompt is spliced in as bytes, never as a list of integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson
from msgspec.structs import replace

from shared.core.errors import BadRequest
from shared.core.model import IMAGE_MARK, Value
from shared.core.upstream_protocol import UpstreamProtocol

if TYPE_CHECKING:
    from shared.core.model import SampleSpec, SamplingParams

# The most stop strings that /v1/completions takes; it answers a longer list with 400.
MAX_COMPLETION_STOPS: Final = 4
_GENERATE: Final = UpstreamProtocol.GENERATE


class UpstreamCall(Value, frozen=True):
    """One POST of an attempt. `sequences` says how many choices are kept, `scores` whether the prompt is scored."""

    body: bytes
    sequences: int
    scores: bool
    protocol: UpstreamProtocol = UpstreamProtocol.COMPLETIONS
    max_tokens: int = 2**31 - 1


def beyond_completions(spec: SampleSpec) -> str | None:
    """Explain, as the start of a sentence, why completions cannot answer this sample; None if they can."""
    if spec.images:
        return "the prompt has chunks of type 'image', the upstream's /v1/completions takes token ids only"
    stop = spec.params.stop
    if stop and isinstance(stop[0], str) and len(stop) > MAX_COMPLETION_STOPS:
        return f"stop has {len(stop)} strings, the upstream's /v1/completions takes at most {MAX_COMPLETION_STOPS}"
    return None


def completion_budget(spec: SampleSpec, context_tokens: int | None) -> int:
    """Return how many tokens to ask for: as many as wanted and as the context leaves.

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


def plan_calls(
    spec: SampleSpec,
    model: str,
    context_tokens: int | None,
    protocol: UpstreamProtocol = UpstreamProtocol.COMPLETIONS,
) -> list[UpstreamCall]:
    """Write the requests of one attempt, first that of the prompt's scores if it is separate.

    The caller makes sure that what is `beyond_completions` uses the other protocol. Raises as `completion_budget` does.
    """
    max_tokens = completion_budget(spec, context_tokens)
    choices = 1 if spec.params.temperature == 0.0 else spec.num_samples
    build = _generate_body if protocol is _GENERATE else _completion_body
    fields = _sampling_fields(spec.params, max_tokens, choices)
    topk = spec.topk_sample_logprobs
    scored = spec.prompt_logprobs or spec.topk_prompt_logprobs > 0
    if not scored or choices == 1:
        return [UpstreamCall(build(spec, model, fields, topk, scored), choices, scored, protocol, max_tokens)]
    scores = build(spec, model, _ONE_TOKEN, 0, True)
    return [
        UpstreamCall(scores, 0, True, protocol),
        UpstreamCall(build(spec, model, fields, topk, False), choices, False, protocol, max_tokens),
    ]


def _completion_body(spec: SampleSpec, model: str, sampling: dict[str, Any], topk: int, scores: bool) -> bytes:
    fields = {"model": model, **_NEUTRAL, "return_token_ids": True, **sampling, "logprobs": topk}
    if topk:
        fields["return_tokens_as_token_ids"] = True
    if scores:
        fields["prompt_logprobs"] = spec.topk_prompt_logprobs
    return _splice(b'{"prompt":[', spec.prompt, fields)


def _generate_body(spec: SampleSpec, model: str, sampling: dict[str, Any], topk: int, scores: bool) -> bytes:
    params = {**_NEUTRAL, **sampling, "logprobs": topk + 1 if topk else 0}
    if scores:
        params["prompt_logprobs"] = spec.topk_prompt_logprobs
    fields: dict[str, Any] = {"model": model, "sampling_params": params}
    if not spec.images:
        return _splice(b'{"token_ids":[', spec.prompt, fields)
    # So that the reply shows what became of the images: a vLLM that does not know them drops them silently.
    fields["return_token_ids"] = True
    images: list[bytes] = []
    for image in spec.images:
        images += (b',{"type":"image_url","url":"data:image/%b;base64,' % image.format.encode(), image.data, b'"}')
    images[0] = images[0][1:]
    # Joined once: images may take tens of MiB.
    return b"".join((b'{"content_parts":[', *images, b'],"token_ids":[', spec.prompt, b"],", orjson.dumps(fields)[1:]))


def place_images(spec: SampleSpec, token_id: int) -> SampleSpec:
    """Put the model's placeholder token in the place of each image."""
    return replace(spec, prompt=spec.prompt.replace(IMAGE_MARK, b"%d" % token_id))


def _sampling_fields(params: SamplingParams, max_tokens: int, choices: int) -> dict[str, Any]:
    """Return the fields that have the same names in both protocols."""
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "n": choices,
    }
    if params.seed is not None:
        fields["seed"] = params.seed
    stop = params.stop
    if stop is None:
        return fields
    if not stop:
        fields["ignore_eos"] = True
    elif isinstance(stop[0], str):
        # A special token (an end-of-turn mark, say) is looked for in the text too; by default vLLM leaves it out there.
        fields |= {"stop": stop, "skip_special_tokens": False}
    else:
        fields["stop_token_ids"] = stop
    return fields


# To have the prompt scored, a token must be sampled.
_ONE_TOKEN: Final[dict[str, Any]] = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "n": 1}
# A model's own defaults for these would change the distribution that the client asked for.
_NEUTRAL: Final[dict[str, Any]] = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def _splice(opening: bytes, prompt: bytes, fields: dict[str, Any]) -> bytes:
    # Joined once, because each `+` would copy the prompt.
    return b"".join((opening, prompt, b"],", orjson.dumps(fields)[1:]))
