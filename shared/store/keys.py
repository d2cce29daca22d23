"""The names of everything in Redis, in one place.

Braces mark what decides the slot on a cluster: what belongs to a sampling session stands in one, what belongs to a
worker instance in another, and every sample wherever its whole name falls, so that payloads spread over all shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.core.model import SampleKey

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Keys:
    """All under one prefix, so that several gateways can share a server."""

    prefix: str

    @property
    def samples_prefix(self) -> str:
        """A sample's name is this and its `member`."""
        return f"{self.prefix}:s:"

    def sample(self, key: SampleKey) -> str:
        return f"{self.prefix}:s:{key.session_key}:{key.seq_id}"

    def samples(self, keys: Sequence[SampleKey]) -> list[str]:
        return [self.sample(key) for key in keys]

    def log(self, session_key: str, clone_id: int) -> str:
        return f"{self.prefix}:d:{{{session_key}}}:{clone_id}"

    def open_set(self, owner: str) -> str:
        return f"{self.prefix}:o:{{{owner}}}"

    def lease(self, owner: str) -> str:
        return f"{self.prefix}:e:{{{owner}}}"

    @property
    def instances(self) -> str:
        return f"{self.prefix}:w"

    @property
    def refills(self) -> str:
        return f"{self.prefix}:r"

    @property
    def roll(self) -> str:
        return f"{self.prefix}:t"

    def inbox(self, owner: str) -> str:
        return f"{self.prefix}:i:{{{owner}}}"

    def session(self, session_id: str) -> str:
        return f"{self.prefix}:n:{session_id}"

    def sessions_of(self, owner_tag: str) -> str:
        return f"{self.prefix}:m:{owner_tag}"

    def clones(self, session_key: str) -> str:
        return f"{self.prefix}:c:{{{session_key}}}"

    @property
    def upstreams(self) -> str:
        return f"{self.prefix}:u"

    def lock(self, name: str) -> str:
        return f"{self.prefix}:k:{name}"

    # -- channels

    @property
    def announcements(self) -> str:
        return f"{self.prefix}:a:"

    def announcement(self, session_key: str) -> str:
        return f"{self.announcements}{{{session_key}}}"

    def announced(self, channel: str) -> str:
        """The session key in a channel of announcements."""
        return channel[len(self.announcements) + 1 : -1]

    def control(self, owner: str) -> str:
        return f"{self.prefix}:x:{{{owner}}}"

    @property
    def control_all(self) -> str:
        return f"{self.prefix}:x"


def member(key: SampleKey) -> str:
    """A sample as it stands in its owner's open set."""
    return f"{key.session_key}:{key.seq_id}"


def key_of(text: str) -> SampleKey:
    session_key, _, seq_id = text.rpartition(":")
    return SampleKey(session_key, int(seq_id))
