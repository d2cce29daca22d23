"""The time after a server was restarted, while the workers tell it again what they run.

Until then a record that is missing says nothing: the sample may be running on a worker that has not entered it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shared.clock import Clock
    from shared.store.base import Store

# The slowest worker reconnects 0.5 s after the first one at most (link.py), later where its loop is busy, and tends to
# the store at once. How long it then enters samples, a worker reckons from its own refill (housekeeping.py): samples
# are spread evenly.
REFILL_S: Final = 1.5


def is_refilling(store: Store, clock: Clock) -> bool:
    """Whether what the store does not know may still be on its way to it."""
    restarted_s = store.restarted_s
    return restarted_s is not None and clock.monotonic_s() - restarted_s < REFILL_S
