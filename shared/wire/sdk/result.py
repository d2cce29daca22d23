"""Encode a sample's result in the SDK's protobuf form and decode it; write JSON for SDKs without protobuf.

The messages are those of `tinker_public.proto` beside this file. They are declared here as data and built in a
descriptor pool of our own: generated code would pin the protobuf runtime to the compiler's version, and the default
pool belongs to an SDK that may be imported in the same process. Package names do not travel on the wire.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import orjson
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from shared.core.result import EMPTY_LOGPROB, PromptScores, SampleResult, SequenceResult, StopReason, TopK

_PACKAGE: Final = "sampling_gateway"
_FIELD: Final = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {"bytes": _FIELD.TYPE_BYTES, "int32": _FIELD.TYPE_INT32, "uint32": _FIELD.TYPE_UINT32}

# message -> (number, name, type, label)
MESSAGES: Final[dict[str, tuple[tuple[int, str, str, str], ...]]] = {
    "TopkLogprobs": (
        (1, "token_ids", "bytes", ""),
        (2, "logprobs", "bytes", ""),
        (3, "k", "uint32", ""),
        (4, "length", "uint32", ""),
    ),
    "SampledSequence": (
        (1, "stop_reason", "StopReason", ""),
        (2, "tokens", "bytes", ""),
        (3, "logprobs", "bytes", "optional"),
        (4, "topk_sampled_logprobs", "TopkLogprobs", "optional"),
    ),
    "SampleResponse": (
        (1, "sequences", "SampledSequence", "repeated"),
        (2, "prompt_logprobs", "bytes", "optional"),
        (3, "topk_prompt_logprobs", "TopkLogprobs", "optional"),
        (4, "prompt_cache_hit_tokens", "int32", ""),
    ),
}
STOP_REASONS: Final = (StopReason.STOP, StopReason.LENGTH)


def _build_pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="sampling_gateway.proto", package=_PACKAGE, syntax="proto3")
    stop_reason = file.enum_type.add(name="StopReason")
    for number, reason in enumerate(STOP_REASONS):
        stop_reason.value.add(name=f"STOP_REASON_{reason.name}", number=number)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields:
            _add_field(message, *field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _add_field(message: descriptor_pb2.DescriptorProto, number: int, name: str, kind: str, label: str) -> None:
    field = message.field.add(name=name, number=number)
    field.label = _FIELD.LABEL_REPEATED if label == "repeated" else _FIELD.LABEL_OPTIONAL
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _FIELD.TYPE_ENUM if kind == "StopReason" else _FIELD.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"
    if label == "optional":
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


_SampleResponse: Final[Any] = message_factory.GetMessageClass(
    _build_pool().FindMessageTypeByName(f"{_PACKAGE}.SampleResponse")
)


def encode_sample_response(result: SampleResult) -> bytes:
    """Return the bytes of a SampleResponse."""
    # Attribute by attribute: nested constructors copy every buffer twice.
    message = _SampleResponse()
    for sequence in result.sequences:
        added = message.sequences.add()
        added.stop_reason = STOP_REASONS.index(sequence.stop_reason)
        added.tokens = sequence.tokens
        added.logprobs = sequence.logprobs
        if sequence.topk is not None:
            _fill(added.topk_sampled_logprobs, sequence.topk)
    if result.prompt is not None:
        if result.prompt.logprobs is not None:
            message.prompt_logprobs = result.prompt.logprobs
        if result.prompt.topk is not None:
            _fill(message.topk_prompt_logprobs, result.prompt.topk)
    message.prompt_cache_hit_tokens = result.prompt_cache_hit_tokens
    encoded: bytes = message.SerializeToString()
    return encoded


def decode_sample_response(data: bytes | memoryview) -> SampleResult:
    """Decode a SampleResponse. Raises `ValueError` if it is not one."""
    message = _SampleResponse()
    try:
        message.ParseFromString(bytes(data))
    except DecodeError as error:
        raise ValueError(f"not a SampleResponse: {error}") from error
    sequences = tuple(
        SequenceResult(
            sequence.tokens,
            sequence.logprobs,
            _stop_reason(sequence.stop_reason),
            _topk(sequence.topk_sampled_logprobs) if sequence.HasField("topk_sampled_logprobs") else None,
        )
        for sequence in message.sequences
    )
    logprobs = message.prompt_logprobs if message.HasField("prompt_logprobs") else None
    topk = _topk(message.topk_prompt_logprobs) if message.HasField("topk_prompt_logprobs") else None
    scores = PromptScores(logprobs, topk) if logprobs is not None or topk is not None else None
    return SampleResult(sequences, scores, message.prompt_cache_hit_tokens)


def sample_response_json(data: bytes | memoryview) -> bytes:
    """Write the JSON form that SDKs up to 0.24.1 read: null for NaN, `[id, logprob]` pairs for the top-k."""
    result = decode_sample_response(data)
    document: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": sequence.stop_reason.value,
                "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
                "logprobs": _floats_json(sequence.logprobs),
            }
            for sequence in result.sequences
        ],
        "prompt_cache_hit_tokens": result.prompt_cache_hit_tokens,
    }
    if result.prompt is not None and result.prompt.logprobs is not None:
        document["prompt_logprobs"] = _floats_json(result.prompt.logprobs)
    if result.prompt is not None and result.prompt.topk is not None:
        document["topk_prompt_logprobs"] = _topk_json(result.prompt.topk)
    return orjson.dumps(document)


def _stop_reason(number: int) -> StopReason:
    if not 0 <= number < len(STOP_REASONS):
        raise ValueError(f"not a SampleResponse: its stop_reason is {number}")
    return STOP_REASONS[number]


def _fill(target: Any, topk: TopK) -> None:
    target.token_ids = topk.token_ids
    target.logprobs = topk.logprobs
    target.k = topk.k
    target.length = topk.length


def _topk(message: Any) -> TopK:
    return TopK(message.token_ids, message.logprobs, message.k, message.length)


def _floats_json(data: bytes) -> list[float | None]:
    return [None if math.isnan(value) else value for value in np.frombuffer(data, "<f4").tolist()]


def _topk_json(topk: TopK) -> list[list[tuple[int, float]] | None]:
    ids = np.frombuffer(topk.token_ids, "<i4").reshape(topk.length, topk.k).tolist()
    logprobs = np.frombuffer(topk.logprobs, "<f4").reshape(topk.length, topk.k).tolist()
    rows = (zip(*row, strict=True) for row in zip(ids, logprobs, strict=True))
    return [[(token, value) for token, value in row if value != EMPTY_LOGPROB] or None for row in rows]
