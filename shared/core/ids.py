"""Ids that describe themselves.

A session that Redis lost is rebuilt from its id, on any worker of any host, when the owner tag inside it matches the
caller. So an id carries everything that a worker must know:

    session            gws-<random 16 bytes + tag 8 bytes>
    lone session       gwo-<random 16 bytes>, of a sample without a session; only inside the id of a sampling session
    sampling session   gwss-<key 16 bytes + tag 8 bytes>.<session id>.<model>
    sample (future)    <sampling session>:<seq_id>
    sequence           <key>:<seq_id>:<index>

Bytes are URL-safe base64 without padding (24 bytes are 32 characters); `.` and `:` do not occur in it. The tag is a
keyed hash of all that the id says, keyed by the caller's API key, so an id that was altered, or is somebody else's, is
not ours. The key of a sampling session is a keyed hash of (session, sampling_session_seq_id, model): the SDK repeats
`create_sampling_session` with the same pair after a lost reply, and any worker answers with the same id, without
asking Redis. Randomness comes in as an argument.
"""

from __future__ import annotations

import base64
import hmac
import re
from hashlib import blake2b, sha256
from typing import Final

from shared.core.model import MAX_SEQ_ID, ModelRef, SampleKey, SamplingSession

RANDOM_BYTES: Final = 16
_TAG_BYTES: Final = 8
_CORE_CHARS: Final = 32
_KEY_CHARS: Final = 22
# Longer than any id made here from a model name of sensible length; keeps hostile ids cheap.
MAX_ID_CHARS: Final = 1024

_SESSION: Final = re.compile(r"gws-([A-Za-z0-9_-]{32})")
_SAMPLING: Final = re.compile(r"gwss-([A-Za-z0-9_-]{32})\.([A-Za-z0-9_~-]+)\.([bp])([A-Za-z0-9_-]*)")
_LONE: Final = "gwo-"
_PLAIN: Final = re.compile(r"[A-Za-z0-9_-]+")
_SEQ_CHARS: Final = 19

ANONYMOUS_SECRET: Final = sha256(b"tinker-sampling-gateway:anonymous").digest()


def owner_secret(api_key: str) -> bytes:
    """Return the 32-byte secret that tags an API key's ids; it is not the hash that a keys file stores."""
    return sha256(b"tinker-sampling-gateway:owner:" + api_key.encode()).digest()


def owner_tag(secret: bytes) -> str:
    """Return the 16 characters that name an owner in the store and reveal nothing of the secret."""
    return blake2b(b"owner", key=secret, digest_size=8).hexdigest()


def new_session_id(random_bytes: bytes, secret: bytes) -> str:
    """Make a session id of 16 random bytes."""
    return "gws-" + _b64(random_bytes + _tag(secret, b"session", random_bytes))


def lone_session_id(random_bytes: bytes) -> str:
    """Make the id that stands for the session of a sample that has none. No client ever names it by itself."""
    return _LONE + _b64(random_bytes)


def is_lone(session_id: str) -> bool:
    return session_id.startswith(_LONE)


def owns_session(session_id: str, secret: bytes) -> bool:
    match = _SESSION.fullmatch(session_id) if len(session_id) <= MAX_ID_CHARS else None
    if match is None:
        return False
    core = _unb64(match[1])
    return hmac.compare_digest(core[RANDOM_BYTES:], _tag(secret, b"session", core[:RANDOM_BYTES]))


def sampling_session(session_id: str, ordinal: bytes, model: ModelRef, secret: bytes) -> SamplingSession:
    """Return the sampling session that `(session_id, ordinal, model)` names.

    `ordinal` is the SDK's sampling_session_seq_id in decimal, or random bytes where there is none.
    """
    model_part = ("b" if model.base_model is not None else "p") + _b64(model.name.encode())
    # A trainer's session id may hold anything; ours is kept readable.
    session_part = session_id if _PLAIN.fullmatch(session_id) else "~" + _b64(session_id.encode())
    # Keyed, so that two owners of one trainer's session id never share a key in the store.
    key_bytes = blake2b(
        b"\0".join((session_part.encode(), model_part.encode(), ordinal)),
        key=secret,
        digest_size=RANDOM_BYTES,
    ).digest()
    tag = _tag(secret, b"sampling", key_bytes, session_part.encode(), model_part.encode())
    core = _b64(key_bytes + tag)
    session_key = _b64(key_bytes)[:_KEY_CHARS]
    return SamplingSession(f"gwss-{core}.{session_part}.{model_part}", session_key, session_id, model)


def parse_sampling_session(text: str, secret: bytes) -> SamplingSession | None:
    """Return the sampling session that an id describes; None if it is malformed or not the caller's."""
    match = _SAMPLING.fullmatch(text) if len(text) <= MAX_ID_CHARS else None
    if match is None:
        return None
    core, session_part, kind, model_text = match.groups()
    raw = _unb64(core)
    key_bytes, tag = raw[:RANDOM_BYTES], raw[RANDOM_BYTES:]
    model_part = kind + model_text
    if not hmac.compare_digest(tag, _tag(secret, b"sampling", key_bytes, session_part.encode(), model_part.encode())):
        return None
    # The tag vouches for the rest: only text that we encoded ourselves gets here.
    name = _unb64(model_text).decode()
    model = ModelRef(base_model=name) if kind == "b" else ModelRef(model_path=name)
    session_id = _unb64(session_part[1:]).decode() if session_part.startswith("~") else session_part
    return SamplingSession(text, _b64(key_bytes)[:_KEY_CHARS], session_id, model)


def request_id(session: SamplingSession, seq_id: int) -> str:
    return f"{session.sampling_session_id}:{seq_id}"


def split_request_id(text: str) -> tuple[str, int] | None:
    """Split a request id into (sampling session id, seq_id); None if it is malformed. Ownership is not checked."""
    if len(text) > MAX_ID_CHARS + 20:
        return None
    head, _, tail = text.rpartition(":")
    # Of ASCII's digits only, without zeros in front; a few calls cost half of a regular expression's.
    if (
        not head
        or not (tail.isdigit() and tail.isascii())
        or len(tail) > _SEQ_CHARS
        or (tail[0] == "0" and tail != "0")
    ):
        return None
    seq_id = int(tail)
    return (head, seq_id) if seq_id <= MAX_SEQ_ID else None


def sequence_ids(key: SampleKey, n: int) -> list[str]:
    """Return n distinct labels, the same ones whenever the same sample is promised again."""
    prefix = f"{key.session_key}:{key.seq_id}:"
    return [f"{prefix}{index}" for index in range(n)]


def _tag(secret: bytes, *parts: bytes) -> bytes:
    return blake2b(b"\0".join(parts), key=secret, digest_size=_TAG_BYTES).digest()


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
