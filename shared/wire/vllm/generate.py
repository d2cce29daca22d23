"""One choice of an `/inference/v1/generate` reply: ids are integers, logprobs are in an object for each token.

Going through the objects takes two to four times as long as reading the arrays of a completion (`generations` in
benchmarks/run.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from shared.core.faults import FaultClass
from shared.wire import json_arrays
from shared.wire.vllm.scores import ReplyError, numbers, sampled_logprobs, token_ids, topk_rows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shared.core.model import SampleSpec
    from shared.core.result import TopK
    from shared.wire.json_arrays import JsonValue

# What vLLM writes in place of NaN and minus infinity, where completions answer 400. No sampled token is that unlikely.
_CLAMPED: Final = -9999.0
# Versions are opaque to vLLM and to us, and may be any text.
_VERSION_CHARS: Final = 64


class NotComputed(ReplyError):
    """A reply of a model that computes NaN. It would do so again."""

    kind = FaultClass.REFUSED


def count_tokens(choice: JsonValue) -> int:
    """Count the tokens of a choice."""
    ids = choice.get("token_ids")
    return len(ids) if ids is not None else 0


def sampled(choice: JsonValue) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the sampled tokens and their logprobs. Raises `ReplyError`."""
    logprobs = sampled_logprobs([place["logprob"] for place in _content(choice)])
    if logprobs.min(initial=0.0) <= _CLAMPED:
        raise NotComputed(f"with the logprob {logprobs.min():g} (the model computes NaN: bad weights or adapter)")
    return token_ids(choice["token_ids"]), logprobs


def sampled_topk(choice: JsonValue, k: int, tokens: int) -> TopK:
    """Return the k best at each of the `tokens` places. Raises `ReplyError`."""
    rows = [json_arrays.plain(place["top_logprobs"]) for place in _content(choice)]
    if len(rows) != tokens or not all(rows):
        raise ReplyError(f"with {tokens} token ids and {sum(map(bool, rows))} rows of top_logprobs")
    entries = [entry for row in rows for entry in row]
    ids = token_ids([entry["token_id"] for entry in entries])
    return topk_rows(ids, numbers([entry["logprob"] for entry in entries]), [len(row) for row in rows], k)


def prompt_rows(reply: JsonValue, first_choice: JsonValue) -> JsonValue:
    """Return the rows of `prompt_logprobs`, or None. The reply has them once for all choices."""
    return reply.get("prompt_logprobs")


class ImagesLeftOut(ReplyError):
    """A reply of a vLLM that ignored the images, and so sampled from another prompt."""

    kind = FaultClass.REFUSED


def with_images_expanded(spec: SampleSpec, reply: JsonValue) -> SampleSpec:
    """Return `spec` with the prompt that vLLM made of its images. Raises `ReplyError` unless it took all of them."""
    listed = reply.get("mm_placeholders")
    modalities: dict[str, Any] = json_arrays.plain(listed) if listed is not None else {}
    places = [place for modality in modalities.values() for place in modality]
    if not all(type(place["offset"]) is int and type(place["length"]) is int for place in places):
        raise TypeError("a place without numbers")
    if len(places) != len(spec.images):
        raise ImagesLeftOut(
            f"with {len(places)} images where {len(spec.images)} were sent; its vLLM may be too old for them"
        )
    ids = token_ids(reply["prompt_token_ids"]).tolist()
    return replace(spec, prompt=",".join(map(str, ids)).encode(), prompt_tokens=len(ids))


def weight_versions(choice: JsonValue) -> tuple[str, ...]:
    """Return the versions of the weights that made a choice's tokens, each once, in order; empty if unknown.

    This is for information only: a generation never fails for it.
    """
    try:
        spans = json_arrays.plain(choice["weight_versions"])
        versions = [str(span["version"])[:_VERSION_CHARS] for span in spans if span["end"] > span["start"]]
    except json_arrays.UNREADABLE:
        return ()
    return tuple(dict.fromkeys(versions))


def _content(choice: JsonValue) -> Any:
    scored = choice.get("logprobs")
    content = scored.get("content") if scored is not None else None
    if content is None:
        raise ReplyError("without logprobs")
    return content
