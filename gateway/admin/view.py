"""What the supervisor knows at one moment, as plain values; `/status`, `/metrics` and `/readyz` are made from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from gateway.admin.timings import Timings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gateway.admin.key_ledger import KeyView
    from gateway.machine.kernel import Usage
    from shared.channel import Status
    from shared.store.contract import StoreInfo


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot and the process that serves it; from `pid` on, fields are None or zero while there is none.

    `draining` counts replaced processes of this slot that finish what they run.
    """

    slot: int
    state: str
    source_ip: str | None
    restarts: int
    pid: int | None
    started_at_s: float | None
    usage: Usage
    status: Status | None
    draining: int


@dataclass(frozen=True, slots=True)
class SpareView:
    """The process that waits for a slot; it serves nobody and no total includes it."""

    state: str
    pid: int
    usage: Usage


@dataclass(frozen=True, slots=True)
class View:
    """The whole gateway.

    `redis` is None while Redis does not answer, and its URL has no password. `spare` is None while there is none.
    `logprobs_scale` is by upstream, None while unknown. `flag_upstreams` are those of the configuration, which count
    while no list is published. `redis_lag_ms` is a round trip of the supervisor. `keys` are those of the keys file.
    """

    url: str
    version: str
    started_at_s: float
    stopping: bool
    slots: tuple[SlotView, ...]
    redis_url: str
    redis_embedded: bool
    redis: StoreInfo | None
    totals: Mapping[str, float]
    loop_lag_ms: float
    logprobs_scale: Mapping[str, bool | None] = field(default_factory=dict)
    spare: SpareView | None = None
    flag_upstreams: Sequence[str] = ()
    redis_lag_ms: float = 0.0
    since_start: Timings = field(default_factory=Timings)
    last_minute: Timings = field(default_factory=Timings)
    keys: tuple[KeyView, ...] = ()


class Controls(Protocol):
    """The supervisor, as far as the admin address may use it."""

    def view(self) -> View: ...

    def restart_slot(self, slot: int) -> bool:
        """Replace the slot's worker, or return False if there is no such slot."""
        ...

    def reload(self) -> None:
        """Do what SIGHUP does. Raises `ConfigError` and changes nothing if the configuration is invalid now."""
        ...

    async def upstream_list(self, wanted: Sequence[str] | None) -> Sequence[str]:
        """Publish `wanted` unless it is None, and return the published list, empty if there is none.

        Raises `StoreError`.
        """
        ...
