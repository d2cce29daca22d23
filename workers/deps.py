"""What the handlers of one worker share. Built once, in `workers/worker.py`; nothing is looked up by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from workers.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.clock import Clock
    from shared.config import Settings
    from shared.counters import Counters
    from shared.store.base import Store
    from workers.adapters import Adapters
    from workers.clocks import DeliveryClocks
    from workers.dispatcher import Dispatcher
    from workers.engines import Engines
    from workers.keyring import Keyring
    from workers.pool import UpstreamPool
    from workers.registry import Registry
    from workers.sessions import Sessions
    from workers.settlements import Settlements
    from workers.trainer import Trainer
    from workers.waiters import Waiters

# A few milliseconds of submissions, and of polls that are woken.
_REQUESTS_PER_TURN: Final = 16


@dataclass(slots=True)
class Live:
    """What a reload may change while requests are served."""

    settings: Settings
    keyring: Keyring


@dataclass(frozen=True, slots=True)
class Deps:
    live: Live
    store: Store
    dispatcher: Dispatcher
    waiters: Waiters
    sessions: Sessions
    pool: UpstreamPool
    registry: Registry
    adapters: Adapters
    clocks: DeliveryClocks
    settlements: Settlements
    counters: Counters
    clock: Clock
    random_bytes: Callable[[int], bytes]
    engines: Engines
    trainer: Trainer | None = None
    turns: Turns = field(default_factory=lambda: Turns(_REQUESTS_PER_TURN))
