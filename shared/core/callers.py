"""Who is calling. Keys are known by their hash only; anonymous mode is one owner for everybody."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import msgspec

from shared.core import ids
from shared.core.errors import Unauthorized

if TYPE_CHECKING:
    from collections.abc import Sequence


# Longer than any key or JWT in use; bounds what is hashed for a stranger.
_MAX_KEY_CHARS: Final = 4096


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one API key; None means no limit but the worker's own."""

    max_in_flight: int | None = None
    max_in_flight_bytes: int | None = None
    max_sessions: int | None = None
    max_request_tokens: int | None = None  # num_samples x max_tokens of one request


NO_LIMITS = KeyLimits()


class ApiKey(msgspec.Struct, frozen=True):
    """A key in the keys file: `sha256` is its hex digest; the key itself is stored nowhere."""

    name: str
    sha256: str
    limits: KeyLimits = NO_LIMITS


@dataclass(frozen=True, slots=True)
class Caller:
    """`name` is the operator's name for the key; `secret` tags the ids that this caller is given.

    `digest`: the key's SHA-256, distinguishes a key from a later one of that name; empty for the anonymous one.
    """

    name: str
    secret: bytes
    digest: bytes = b""
    limits: KeyLimits = NO_LIMITS


# For a key that never was one, too.
REVOKED: Final = "this API key is not known here"
ANONYMOUS: Final = Caller("anonymous", ids.ANONYMOUS_SECRET)


class Keyring:
    """`api_keys`: None lets everybody in as the anonymous caller; an empty one lets nobody in."""

    def __init__(self, api_keys: Sequence[ApiKey] | None) -> None:
        self._anonymous = api_keys is None
        self._keys = {bytes.fromhex(key.sha256): key for key in api_keys or ()}
        # Hashing twice per request is a microsecond each; only keys that are known get in here.
        self._seen: dict[str, Caller] = {}

    def identify(self, api_key: str | None) -> Caller:
        """Identify the caller by an `X-API-Key` header. Raises `Unauthorized`."""
        if self._anonymous:
            return ANONYMOUS
        if not api_key or len(api_key) > _MAX_KEY_CHARS:
            raise Unauthorized("an API key is needed: set TINKER_API_KEY")
        caller = self._seen.get(api_key)
        if caller is None:
            caller = self._seen[api_key] = self._look_up(api_key)
        return caller

    def knows(self, digest: bytes) -> bool:
        """Return whether the caller with this `Caller.digest` is still accepted."""
        return digest in self._keys if digest else self._anonymous

    @property
    def shared(self) -> bool:
        """Return whether callers are distinguished here."""
        return len(self._keys) > 1

    def _look_up(self, api_key: str) -> Caller:
        digest = sha256(api_key.encode()).digest()
        for known, key in self._keys.items():
            if hmac.compare_digest(known, digest):
                return Caller(key.name, ids.owner_secret(api_key), known, key.limits)
        raise Unauthorized(REVOKED)
