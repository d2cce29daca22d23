"""`asample`'s body to a `SampleSpec`, without a Python object per prompt token.

The token list stays the client's own bytes. It is taken out of the body before the rest is read, and looked at once
(token_list.py); where it is written in an unusual way, msgspec reads the whole body first.

Every field is either honoured or refused with a 400 that names it; none is ignored, except those that ask for nothing
of the result (`record_stability_info`, `type`). Sources of names, defaults and ranges: docs/wire.md, docs/upstream.md.
"""

from __future__ import annotations

import math
from hashlib import sha256
from typing import Any, Final, NoReturn

import msgspec

from shared.core.errors import BadRequest
from shared.core.model import IMAGE_MARK, MAX_SEQ_ID, Image, SampleSpec, SamplingParams
from shared.core.record import DIGEST_BYTES
from shared.wire import json_arrays
from shared.wire.sdk.image_chunk import read_image
from shared.wire.strict_json import decode, decode_lifted, lift

MAX_SAMPLES: Final = 1024
# A model name travels inside the ids of its sampling session, and those inside headers and URLs.
MAX_NAME_BYTES: Final = 400
# A sanity bound; what /v1/completions takes is for whoever knows how the upstream is asked (vllm_request.py).
MAX_STOP_STRINGS: Final = 1024
# vLLM's default --max-logprobs is 20, an operator may raise it.
MAX_TOPK: Final = 1024
MAX_TEMPERATURE: Final = 2.0
_INT64: Final = range(-(2**63), 2**63)
_INT32_MAX: Final = 2**31 - 1
_WHITE: Final = b" \n\r\t"

# What was lifted out of the body; None when nothing was.
Lists = list[tuple[bytes, int]] | None


class _Chunk(msgspec.Struct):
    type: str | None = None
    tokens: msgspec.Raw = msgspec.Raw()
    data: msgspec.Raw = msgspec.Raw()
    format: msgspec.Raw = msgspec.Raw()
    expected_tokens: msgspec.Raw = msgspec.Raw()
    location: msgspec.Raw = msgspec.Raw()
    dmel: msgspec.Raw = msgspec.Raw()


class _Prompt(msgspec.Struct):
    chunks: list[_Chunk]


class _Params(msgspec.Struct):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float | None = 1.0
    top_k: int | None = -1
    top_p: float | None = 1.0


class _Sample(msgspec.Struct):
    prompt: _Prompt
    sampling_session_id: str | None = None
    seq_id: int | None = None
    num_samples: int | None = 1
    sampling_params: _Params = msgspec.field(default_factory=_Params)
    prompt_logprobs: bool | None = False
    topk_prompt_logprobs: int | None = 0
    topk_sample_logprobs: int | None = 0
    target_prompt_logprobs: msgspec.Raw = msgspec.Raw()
    prompt_alt_tokens_k: int | None = 0
    prompt_logprobs_last_n: int | None = None
    base_model: str | None = None
    model_path: str | None = None


class SampleCall(msgspec.Struct, frozen=True):
    """One decoded `asample`. `seq_id` is below 2**63; without a sampling session one of the models is set."""

    sampling_session_id: str | None
    seq_id: int | None
    base_model: str | None
    model_path: str | None
    spec: SampleSpec


_decoder: Final = msgspec.json.Decoder(_Sample)


def decode_sample(body: bytes) -> SampleCall:
    """Return the submission in `body`. Raises `BadRequest` with one sentence for the caller."""
    lifted = lift(body)
    if lifted is None:
        sample, lists = decode(_decoder, body, "sample request"), None
    else:
        sample, lists = decode_lifted(_decoder, lifted, "sample request"), lifted.lists
    _refuse_unsupported(sample)
    if sample.seq_id is not None and not 0 <= sample.seq_id <= MAX_SEQ_ID:
        raise BadRequest("seq_id must be an integer from 0 to 2**63 - 1")
    if sample.sampling_session_id is None:
        if (sample.base_model is None) == (sample.model_path is None):
            raise BadRequest("sampling_session_id is missing")
        require_name(sample.base_model if sample.base_model is not None else sample.model_path)
    spec = _spec(sample, lists)
    return SampleCall(sample.sampling_session_id, sample.seq_id, sample.base_model, sample.model_path, spec)


def require_name(name: str | None) -> None:
    """Raises `BadRequest` when a model cannot have this name or path."""
    # msgspec has refused lone surrogates: what it lets through can be encoded.
    if not name or len(name.encode()) > MAX_NAME_BYTES:
        raise BadRequest(f"a model's name or path must have 1 to {MAX_NAME_BYTES} bytes")


def _digest(num_samples: int, params: SamplingParams, rest: tuple[Any, ...], prompt: bytes) -> bytes:
    """Return 16 bytes that are equal for requests of equal meaning, however they were written.

    `rest`: all that decides the result besides the number of samples, `params` and the prompt. Every host and version
    must compute the same bytes for the same request: a repeat may reach another one.
    """
    decisive = repr((params.stop, params.temperature, params.top_k, params.top_p, *rest))[1:]
    # Processors have instructions for this hash: half of blake2b's time for a long prompt.
    head = b"(%d, %a, %a, %b\0" % (
        num_samples,
        params.max_tokens,
        params.seed,
        decisive.encode("utf-8", "surrogatepass"),
    )
    hashed = sha256(head)
    hashed.update(prompt)
    return hashed.digest()[:DIGEST_BYTES]


def _refuse_unsupported(sample: _Sample) -> None:
    target = bytes(sample.target_prompt_logprobs)
    if target and target != b"null":
        raise BadRequest("target_prompt_logprobs is not supported: no upstream is asked to score given ids")
    if sample.prompt_alt_tokens_k:
        raise BadRequest("prompt_alt_tokens_k is not supported: no upstream can draw alternatives to a prompt")


def _spec(sample: _Sample, lists: Lists) -> SampleSpec:
    prompt, prompt_tokens, images = _prompt(sample.prompt.chunks, lists)
    num_samples = _in_range("num_samples", sample.num_samples, 1, 1, MAX_SAMPLES)
    params = _params(sample.sampling_params)
    rest = (
        bool(sample.prompt_logprobs),
        _in_range("topk_prompt_logprobs", sample.topk_prompt_logprobs, 0, 0, MAX_TOPK),
        _in_range("topk_sample_logprobs", sample.topk_sample_logprobs, 0, 0, MAX_TOPK),
        _last_n(sample, prompt_tokens),
    )
    seen = [(image.format, sha256(image.data).digest()) for image in images]
    digest = _digest(num_samples, params, (*rest, *seen), prompt)
    return SampleSpec(prompt, prompt_tokens, num_samples, params, *rest, digest, tuple(images))


def _prompt(chunks: list[_Chunk], lists: Lists) -> tuple[bytes, int, list[Image]]:
    """The ids of all chunks, joined, with a mark for each image; how many tokens there are; the images."""
    images: list[Image] = []
    found = [_tokens(place, chunk, lists, images) for place, chunk in enumerate(chunks)]
    parts = [inside for inside, ids in found if ids]
    if not parts:
        raise BadRequest("the prompt is empty: it needs at least one token")
    return b",".join(parts) if len(parts) > 1 else parts[0], sum(ids for _, ids in found), images


def _tokens(place: int, chunk: _Chunk, lists: Lists, images: list[Image]) -> tuple[bytes, int]:
    """Adds to `images`."""
    kind = chunk.type or _kind_of(chunk)
    if kind == "image":
        image, tokens = read_image(place, bytes(chunk.data), bytes(chunk.format), bytes(chunk.expected_tokens))
        images.append(image)
        return IMAGE_MARK, tokens
    if kind != "encoded_text":
        raise BadRequest(
            f"prompt chunk {place} is of type {kind[:40]!r}: {_REASONS.get(kind, 'there is no such type')}"
        )
    raw = bytes(chunk.tokens)
    if lists is not None and raw:
        return lists[int(raw[1:-1])]
    inside = raw[1:-1].translate(None, _WHITE)
    if raw.startswith(b"[") and not inside:
        return b"", 0
    ids = json_arrays.count(inside) if raw.startswith(b"[") else None
    if ids is None:
        _refuse_tokens(place, raw, inside)
    return inside, ids


_REASONS: Final = {
    "image_asset_pointer": "nothing is fetched for a prompt; send the file itself, in a chunk of type 'image'",
    "dmel": "no upstream can be asked with it; allowed are encoded_text and image",
}


def _refuse_tokens(place: int, raw: bytes, inside: bytes) -> NoReturn:
    if raw.startswith(b"[") and not inside.translate(None, b"0123456789,"):
        # JSON it is, as msgspec has read it: only its size is left to be wrong.
        raise BadRequest(f"the tokens of prompt chunk {place} must be below 1,000,000,000")
    raise BadRequest(f"the tokens of prompt chunk {place} must be a list of non-negative integers")


def _kind_of(chunk: _Chunk) -> str:
    """SDK 0.16.1 leaves the type out: it shows in the keys."""
    if chunk.location:
        return "image_asset_pointer"
    if chunk.data:
        return "image"
    return "dmel" if chunk.dmel else "encoded_text"


def _params(params: _Params) -> SamplingParams:
    if params.max_tokens is not None and not 1 <= params.max_tokens <= _INT32_MAX:
        raise BadRequest(f"max_tokens must be an integer from 1 to {_INT32_MAX}")
    if params.seed is not None and params.seed not in _INT64:
        raise BadRequest("seed must fit into 64 bits")
    return SamplingParams(
        max_tokens=params.max_tokens,
        seed=params.seed,
        stop=_stop(params.stop),
        temperature=_temperature(params.temperature),
        top_k=_top_k(params.top_k),
        top_p=_top_p(params.top_p),
    )


def _temperature(value: float | None) -> float:
    if value is None:
        return 1.0
    if not math.isfinite(value) or not 0.0 <= value <= MAX_TEMPERATURE:
        raise BadRequest(f"temperature must be from 0 to {MAX_TEMPERATURE:g}")
    # -0.0 and 0.0 are one temperature.
    return float(value) + 0.0


def _top_p(value: float | None) -> float:
    if value is None:
        return 1.0
    if not math.isfinite(value) or not 0.0 < value <= 1.0:
        raise BadRequest("top_p must be above 0 and at most 1")
    return float(value)


def _top_k(value: int | None) -> int:
    """0 and -1 both mean off."""
    if value is None or value == 0:
        return -1
    if not -1 <= value <= _INT32_MAX:
        raise BadRequest("top_k must be -1 (off) or a positive integer")
    return value


def _stop(stop: str | list[str | int] | None) -> tuple[str, ...] | tuple[int, ...] | None:
    if stop is None:
        return None
    items = [stop] if isinstance(stop, str) else stop
    texts = tuple(item for item in items if isinstance(item, str))
    token_ids = tuple(item for item in items if isinstance(item, int))
    if texts and token_ids:
        raise BadRequest("stop must be all strings or all token ids")
    if len(texts) > MAX_STOP_STRINGS:
        raise BadRequest(f"stop has {len(texts)} strings, the most are {MAX_STOP_STRINGS:,}")
    if any(not text for text in texts):
        raise BadRequest("stop must not hold an empty string")
    if any(not 0 <= token_id <= _INT32_MAX for token_id in token_ids):
        raise BadRequest("the token ids of stop must be non-negative 32-bit integers")
    return texts or token_ids


def _last_n(sample: _Sample, prompt_tokens: int) -> int | None:
    last_n = sample.prompt_logprobs_last_n
    if last_n is None:
        return None
    if not sample.prompt_logprobs:
        raise BadRequest("prompt_logprobs_last_n needs prompt_logprobs")
    if not 1 <= last_n <= prompt_tokens - 1:
        raise BadRequest(f"prompt_logprobs_last_n must be from 1 to the prompt's length less one ({prompt_tokens - 1})")
    return last_n


def _in_range(name: str, value: int | None, default: int, least: int, most: int) -> int:
    if value is None:
        return default
    if not least <= value <= most:
        raise BadRequest(f"{name} must be an integer from {least} to {most}")
    return value
