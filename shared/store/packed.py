"""The two commands of every sample as bytes, each from one template: what hiredis would pack, at a third of the cost.

A template has all that is the same for every sample of an owner, down to the lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shared.core.record import HEADER_BYTES
from shared.store import scripts

if TYPE_CHECKING:
    from shared.store.keys import Keys
    from shared.store.lines import Script

# A word that differs from sample to sample: its length, then itself.
_ANY: Final = b"$%d\r\n%b\r\n"
_ANY_HEADER: Final = b"$%d\r\n%%b\r\n" % HEADER_BYTES
_ANY_RECORD: Final = b"$%d\r\n%b%b\r\n"


class PackedCommands:
    """`member` is the sample's name in its owner's open set, `header` the 40 bytes of its record."""

    def __init__(self, keys: Keys, owner: str) -> None:
        self.owner = owner
        self._record_prefix = keys.samples_prefix.encode()
        open_set = _word(keys.open_set(owner))
        self._begin = _template(scripts.BEGIN, [_ANY, open_set], [_ANY_HEADER, _ANY])
        self._settle = _template(scripts.SETTLE, [_ANY, open_set, _ANY], [_ANY_RECORD, _ANY, _ANY, _ANY, _ANY])

    def begin(self, member: bytes, header: bytes) -> bytes:
        name = self._record_prefix + member
        return self._begin % (len(name), name, header, len(member), member)

    def settle(
        self, member: bytes, log: bytes, header: bytes, payload: bytes, ttl_ms: bytes, entry: bytes, epoch: bytes
    ) -> bytes:
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


def _template(script: Script, keys: list[bytes], arguments: list[bytes]) -> bytes:
    words = [_word("EVALSHA"), _word(script.name), _word(str(len(keys))), *keys, *arguments]
    return b"*%d\r\n" % len(words) + b"".join(words)


def _word(text: str) -> bytes:
    """As it stands in a template, whatever characters a prefix or an owner has."""
    data = text.encode()
    return b"$%d\r\n" % len(data) + data.replace(b"%", b"%%") + b"\r\n"
