"""What is not in the store: gone for good, or lost by it a moment ago and about to be told again?

A poll that is told "gone" makes its client submit the sample anew. After a loss that would be one execution in vain for
each sample that still runs somewhere. So whoever finds a record missing looks first whether this worker's own lease is
missing as well, which a worker that lives has only lost together with everything else, and whether anybody refills. All
this costs commands only where a record is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.store.refill import REFILL_S

if TYPE_CHECKING:
    from workers.deps import Deps


async def may_come_back(deps: Deps) -> bool:
    """Whether a record that is missing may still be on its way into the store. Raises `StoreError`."""
    dispatcher = deps.dispatcher
    if dispatcher.refilling:
        return True
    lease = await deps.store.watch_lease(dispatcher.owner)
    if not lease.held:
        dispatcher.on_loss()
        return True
    # A worker that was started after a restart has nothing to compare with: others may not be back yet.
    return lease.server_age_s < REFILL_S or await deps.store.refill_left_s() > 0
