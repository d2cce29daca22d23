"""The collector's settings, which are put back."""

from __future__ import annotations

import gc

from gateway.machine.collector import calm_collector


def test_what_is_there_is_left_alone_and_the_rest_is_looked_at_seldom() -> None:
    before = gc.get_threshold()
    # Another test in this process may have calmed it before.
    gc.set_threshold(700, 10, 10)
    try:
        calm_collector()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > 700
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
    assert gc.isenabled()
