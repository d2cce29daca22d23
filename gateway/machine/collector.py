"""Python's garbage collector in processes that hold very many live objects and make little garbage in cycles."""

from __future__ import annotations

import gc

# A collection for every 700 new objects, which is the default, goes through tens of thousands of live tasks each time.
_EVERY_OBJECTS = 50_000


def calm_collector() -> None:
    """What is there now is never looked at again; the rest less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_EVERY_OBJECTS, 20, 100)
