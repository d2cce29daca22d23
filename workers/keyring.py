"""Who is calling. Keys are known by their hash only; anonymous mode is one owner for everybody."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from shared.core import ids
from shared.core.errors import Unauthorized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.config import ApiKey

# Longer than any key or JWT in use; bounds what is hashed for a stranger.
_MAX_KEY_CHARS: Final = 4096


@dataclass(frozen=True, slots=True)
class Caller:
    """`name` is the operator's name for the key; `secret` tags the ids that this caller is given."""

    name: str
    secret: bytes


ANONYMOUS: Final = Caller("anonymous", ids.ANONYMOUS_SECRET)


class Keyring:
    def __init__(self, api_keys: Sequence[ApiKey]) -> None:
        self._names = {bytes.fromhex(key.sha256): key.name for key in api_keys}
        # Hashing twice per request is a microsecond each; only keys that are known get in here.
        self._seen: dict[str, Caller] = {}

    def identify(self, api_key: str | None) -> Caller:
        """The caller behind an `X-API-Key` header; anybody is the anonymous one where no keys are configured.

        Raises `Unauthorized`.
        """
        if not self._names:
            return ANONYMOUS
        if not api_key or len(api_key) > _MAX_KEY_CHARS:
            raise Unauthorized("an API key is needed: set TINKER_API_KEY")
        caller = self._seen.get(api_key)
        if caller is None:
            caller = self._seen[api_key] = self._look_up(api_key)
        return caller

    def _look_up(self, api_key: str) -> Caller:
        digest = sha256(api_key.encode()).digest()
        for known, name in self._names.items():
            if hmac.compare_digest(known, digest):
                return Caller(name, ids.owner_secret(api_key))
        raise Unauthorized("this API key is not known here")
