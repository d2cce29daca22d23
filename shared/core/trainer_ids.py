"""Name what a training server made, its sessions and futures, so that the gateway can distinguish them.

A trainer's session id reaches the client unchanged, since the SDK builds model ids from it. It carries no tag of ours,
so whose it is cannot be read from it, and a record of that could be lost. Instead every caller has a name of its own
for it:

    session   gwf-<keyed hash of the trainer's id>

All that is known of a session here (signs of life, that it was finished, its sampling sessions) is kept under that
name. So there is nothing to be lost, and who presents an id that belongs to another names a session in which nothing
ever happened. Whether the session exists is for the trainer to say: heartbeats and finishes go there, too.

A future of `save_weights_for_sampler` must be recognised when it is polled, on any worker: its result may name a
sampling session. So its id is wrapped in one that describes itself:

    future    gwtf-<tag 8 bytes>.<session name>.<the trainer's id>
"""

from __future__ import annotations

import base64
import hmac
import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from shared.core import ids
from shared.core.model import ModelRef, SamplingSession

_NAME_BYTES: Final = 24
_TAG_BYTES: Final = 8
# Wrapped in base64 with a tag and a name it must stay within MAX_ID_CHARS.
LONGEST_ID_BYTES: Final = 512
_FUTURE: Final = re.compile(r"gwtf-([A-Za-z0-9_-]{11})\.(gw[sf]-[A-Za-z0-9_-]{32})\.([A-Za-z0-9_-]+)")
# `{session_id}:train:{number}`: how the SDK names a model.
_MODEL: Final = re.compile(r"(.+):train:[0-9]+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TrainerFuture:
    """A future that is the trainer's; `session` is the name under which its session is known here."""

    request_id: str
    session: str


def session_name(session_id: str, secret: bytes, *, foreign: bool) -> str | None:
    """Return the name of the caller's session; None if it cannot be the caller's.

    `foreign`: whether there is a trainer, whose ids may be anything.
    """
    if session_id.startswith("gws-"):
        return session_id if ids.owns_session(session_id, secret) else None
    if not foreign or not is_usable(session_id):
        return None
    return "gwf-" + _b64(blake2b(session_id.encode(), key=secret, digest_size=_NAME_BYTES).digest())


def is_usable(trainer_id: str) -> bool:
    """Return whether an id of the trainer's can be used here."""
    # A lone surrogate is no text: JSON can smuggle one in.
    return 0 < len(trainer_id.encode("utf-8", "replace")) <= LONGEST_ID_BYTES and not re.search(
        "[\ud800-\udfff]", trainer_id
    )


def session_of_model(model_id: str) -> str:
    """Return the trainer's session that a model belongs to; a model with another form of name is its own session."""
    match = _MODEL.fullmatch(model_id)
    return match[1] if match is not None else model_id


def is_of_sample(request_id: str) -> bool:
    """Return whether a future was promised for a sample, by the form of its id."""
    return request_id.startswith("gwss-")


def is_wrapped(request_id: str) -> bool:
    return request_id.startswith("gwtf-")


def wrap_future(future: TrainerFuture, secret: bytes) -> str:
    inner = future.request_id.encode()
    return f"gwtf-{_tag(secret, future.session, inner)}.{future.session}.{_b64(inner)}"


def unwrap_future(text: str, secret: bytes) -> TrainerFuture | None:
    """Read a wrapped id; None if it is malformed or not the caller's."""
    match = _FUTURE.fullmatch(text) if len(text) <= ids.MAX_ID_CHARS else None
    if match is None:
        return None
    tag, session, inner_text = match.groups()
    inner = base64.urlsafe_b64decode(inner_text + "=" * (-len(inner_text) % 4))
    if not hmac.compare_digest(tag, _tag(secret, session, inner)):
        return None
    # The tag vouches for the rest.
    return TrainerFuture(inner.decode(), session)


def born_session(session: str, sampler_id: str, model_path: str, secret: bytes) -> SamplingSession:
    """Return the sampling session that stands for the trainer's `sampler_id` here, the same one every time."""
    # The SDK's own numbers are decimal: the two kinds never meet.
    return ids.sampling_session(session, b"trainer:" + sampler_id.encode(), ModelRef(model_path=model_path), secret)


def _tag(secret: bytes, session: str, inner: bytes) -> str:
    tag = blake2b(b"\0".join((b"future", session.encode(), inner)), key=secret, digest_size=_TAG_BYTES)
    return _b64(tag.digest())


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
