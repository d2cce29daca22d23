"""Decode an `asample` body into a `SampleSpec`.

Every field is either honoured or refused with a 400 that names it; none is ignored, except those that ask for nothing
of the result (`record_stability_info`, `type`). Sources of names, defaults and ranges: docs/wire.md, docs/upstream.md.
The prompt, by far the longest part, is read by `prompt.py`.
"""

from __future__ import annotations

import math
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import msgspec

from shared.core.errors import BadRequest
from shared.core.model import MAX_SEQ_ID, SampleSpec, SamplingParams
from shared.core.record import DIGEST_BYTES
from shared.wire.sdk.prompt import MOST_LISTS, Chunk, Prompt
from shared.wire.strict_json import at_once, decode

if TYPE_CHECKING:
    from shared.wire.strict_json import Steps

MAX_SAMPLES: Final = 1024
# A model name travels inside the ids of its sampling session, and those inside headers and URLs.
MAX_NAME_BYTES: Final = 400
# A sanity bound. What /v1/completions takes is checked when the endpoint is known (shared/wire/vllm/request.py).
MAX_STOP_STRINGS: Final = 1024
# vLLM's default --max-logprobs is 20, an operator may raise it.
MAX_TOPK: Final = 1024
MAX_TEMPERATURE: Final = 2.0
_INT64: Final = range(-(2**63), 2**63)
_INT32_MAX: Final = 2**31 - 1
# What one step hashes: some 2 ms.
_HASHED_BYTES: Final = 4 * 2**20


class _Prompt(msgspec.Struct):
    chunks: list[Chunk]


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
    return at_once(sample_steps(body))


def sample_steps(body: bytes, most_lists: int = MOST_LISTS) -> Steps[SampleCall]:
    """Decode as `decode_sample` does, in steps of some milliseconds each however long the body is.

    `most_lists`: a body with more lists of tokens is read chunk by chunk, with the same outcome.
    """
    prompt = Prompt(most_lists)
    sample = decode(_decoder, (yield from prompt.take_out(body)), "sample request")
    _refuse_unsupported(sample)
    if sample.seq_id is not None and not 0 <= sample.seq_id <= MAX_SEQ_ID:
        raise BadRequest("seq_id must be an integer from 0 to 2**63 - 1")
    if sample.sampling_session_id is None:
        if (sample.base_model is None) == (sample.model_path is None):
            raise BadRequest("sampling_session_id is missing")
        require_name(sample.base_model if sample.base_model is not None else sample.model_path)
    yield from prompt.read(sample.prompt.chunks)
    spec = yield from _spec(sample, prompt)
    return SampleCall(sample.sampling_session_id, sample.seq_id, sample.base_model, sample.model_path, spec)


def require_name(name: str | None) -> None:
    """Check a model's name or path. Raises `BadRequest`."""
    # msgspec has refused lone surrogates: what it lets through can be encoded.
    if not name or len(name.encode()) > MAX_NAME_BYTES:
        raise BadRequest(f"a model's name or path must have 1 to {MAX_NAME_BYTES} bytes")


def _digest(num_samples: int, params: SamplingParams, rest: tuple[Any, ...], prompt: bytes) -> Steps[bytes]:
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
    return (yield from _sha256(head, prompt))[:DIGEST_BYTES]


def _sha256(head: bytes, rest: bytes) -> Steps[bytes]:
    hashed = sha256(head)
    for start in range(0, len(rest), _HASHED_BYTES):
        if start:
            yield
        hashed.update(memoryview(rest)[start : start + _HASHED_BYTES])
    return hashed.digest()


def _refuse_unsupported(sample: _Sample) -> None:
    target = bytes(sample.target_prompt_logprobs)
    if target and target != b"null":
        raise BadRequest("target_prompt_logprobs is not supported: no upstream is asked to score given ids")
    if sample.prompt_alt_tokens_k:
        raise BadRequest("prompt_alt_tokens_k is not supported: no upstream can draw alternatives to a prompt")


def _spec(sample: _Sample, prompt: Prompt) -> Steps[SampleSpec]:
    num_samples = _in_range("num_samples", sample.num_samples, 1, 1, MAX_SAMPLES)
    params = _params(sample.sampling_params)
    rest = (
        bool(sample.prompt_logprobs),
        _in_range("topk_prompt_logprobs", sample.topk_prompt_logprobs, 0, 0, MAX_TOPK),
        _in_range("topk_sample_logprobs", sample.topk_sample_logprobs, 0, 0, MAX_TOPK),
        _last_n(sample, prompt.tokens),
    )
    images: list[tuple[str, bytes]] = []
    for image in prompt.images:
        digest = yield from _sha256(b"", image.data)
        images.append((image.format, digest))
    ids = b",".join(prompt.parts)
    digest = yield from _digest(num_samples, params, (*rest, *images), ids)
    return SampleSpec(ids, prompt.tokens, num_samples, params, *rest, digest, tuple(prompt.images))


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
    # Adding 0.0 makes -0.0 and 0.0 the same temperature.
    return float(value) + 0.0


def _top_p(value: float | None) -> float:
    if value is None:
        return 1.0
    if not math.isfinite(value) or not 0.0 < value <= 1.0:
        raise BadRequest("top_p must be above 0 and at most 1")
    return float(value)


def _top_k(value: int | None) -> int:
    """Return the top-k; 0 and -1 both mean off."""
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
