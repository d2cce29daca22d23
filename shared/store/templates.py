"""The three commands of every sample as bytes, each from one template: what hiredis would pack, at a third of the cost.

A template has all that is the same for every sample, of an owner where it names one, down to the lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shared.core.record import HEADER_BYTES
from shared.store import scripts

if TYPE_CHECKING:
    from shared.redis.commands import Script
    from shared.store.schema import Keys

# What a reader asks for before it knows how much there is: all of a small result, and little of a large one, which is
# then read whole, since between two reads it may have become another's.
FIRST_LOOK_BYTES: Final = 32 * 1024
# A word that differs from sample to sample: its length, then itself.
_ANY: Final = b"$%d\r\n%b\r\n"
_ANY_HEADER: Final = b"$%d\r\n%%b\r\n" % HEADER_BYTES
_ANY_RECORD: Final = b"$%d\r\n%b%b\r\n"


class PackedCommands:
    """`member` is the sample's name in its owner's open set, `header` the 40 bytes of its record."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._record_prefix = keys.samples_prefix.encode()
        self._first_look = _template([_word("GETRANGE"), _ANY, _word("0"), _word(str(FIRST_LOOK_BYTES - 1))])
        self._owner: str | None = None
        self._begin = self._settle = b""

    def _name(self, owner: str) -> None:
        """Those of `owner`. A worker is one owner, all its life."""
        open_set = _word(self._keys.open_set(owner))
        self._begin = _script(scripts.BEGIN, [_ANY, open_set], [_ANY_HEADER, _ANY])
        self._settle = _script(scripts.SETTLE, [_ANY, open_set, _ANY], [_ANY_RECORD, _ANY, _ANY, _ANY, _ANY])
        self._owner = owner

    def first_look(self, member: bytes) -> bytes:
        name = self._record_prefix + member
        return self._first_look % (len(name), name)

    def begin(self, owner: str, member: bytes, header: bytes) -> bytes:
        if owner != self._owner:
            self._name(owner)
        name = self._record_prefix + member
        return self._begin % (len(name), name, header, len(member), member)

    def settle(
        self,
        owner: str,
        member: bytes,
        log: bytes,
        header: bytes,
        payload: bytes,
        ttl_ms: bytes,
        entry: bytes,
        epoch: bytes,
    ) -> bytes:
        if owner != self._owner:
            self._name(owner)
        name = self._record_prefix + member
        return self._settle % (
            len(name),
            name,
            len(log),
            log,
            HEADER_BYTES + len(payload),
            header,
            payload,
            len(ttl_ms),
            ttl_ms,
            len(member),
            member,
            len(entry),
            entry,
            len(epoch),
            epoch,
        )


def _script(script: Script, keys: list[bytes], arguments: list[bytes]) -> bytes:
    return _template([_word("EVALSHA"), _word(script.name), _word(str(len(keys))), *keys, *arguments])


def _template(words: list[bytes]) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(words)


def _word(text: str) -> bytes:
    """As it stands in a template, whatever characters a prefix or an owner has."""
    data = text.encode()
    return b"$%d\r\n" % len(data) + data.replace(b"%", b"%%") + b"\r\n"
