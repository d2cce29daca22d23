"""Read and rewrite the few values of a training server's JSON that matter here; the rest passes unread."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from shared.core.trainer_ids import is_usable
from shared.wire.strict_json import decode

T = TypeVar("T")


class SaveForSampler(msgspec.Struct, frozen=True):
    """A call of `save_weights_for_sampler`."""

    model_id: str


class SamplerInfo(msgspec.Struct, frozen=True):
    """A reply of `samplers/{id}`."""

    model_path: str | None = None


class _Weights(msgspec.Struct, frozen=True):
    base_model: str | None = None


class _Session(msgspec.Struct):
    session_id: str


class _Promise(msgspec.Struct):
    request_id: str


class Saved(msgspec.Struct, frozen=True):
    """A result of `save_weights_for_sampler`: a path, or a sampling session that samples from what was saved."""

    path: str | None = None
    sampling_session_id: str | None = None


_calls: Final = msgspec.json.Decoder(SaveForSampler)
_sessions: Final = msgspec.json.Decoder(_Session)
_promises: Final = msgspec.json.Decoder(_Promise)
_saved: Final = msgspec.json.Decoder(Saved)
_samplers: Final = msgspec.json.Decoder(SamplerInfo)
_weights: Final = msgspec.json.Decoder(_Weights)
_objects: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_save_for_sampler(body: bytes) -> SaveForSampler:
    """Decode a call of `save_weights_for_sampler`. Raises `BadRequest`."""
    return decode(_calls, body, "save_weights_for_sampler")


def session_id_of(body: bytes) -> str | None:
    """Return the id in a reply of `create_session`; None if there is no usable one."""
    found = _read(_sessions, body)
    usable = found is not None and is_usable(found.session_id) and not found.session_id.startswith("gws-")
    return found.session_id if found is not None and usable else None


def promised_id(body: bytes) -> str | None:
    """Return the request id of a promise."""
    found = _read(_promises, body)
    return found.request_id if found is not None else None


def saved(body: bytes) -> Saved | None:
    """Return the result of a save; None if the body is something else (still running, an error)."""
    return _read(_saved, body)


def sampler_info(body: bytes) -> SamplerInfo | None:
    return _read(_samplers, body)


def base_model_of(body: bytes) -> str | None:
    """Return the base model in a reply of `weights_info`; None if there is none."""
    found = _read(_weights, body)
    return found.base_model if found is not None else None


def replaced(body: bytes, name: str, value: str) -> bytes:
    """Replace one value of a JSON object and keep every other as it was written. Raises `ValueError`."""
    fields = _objects.decode(body)
    fields[name] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields)


def _read(decoder: msgspec.json.Decoder[T], body: bytes) -> T | None:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
