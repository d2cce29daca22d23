"""The scripts' sources follow the table of transitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shared.core.lifecycle import TRANSITIONS, Event, State
from shared.store import cluster_scripts, scripts

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.core.lifecycle import Transitions
    from shared.redis.commands import Script

BUILDERS = [
    scripts.begin,
    scripts.settle,
    scripts.start_clock,
    scripts.reap,
    cluster_scripts.begin_record,
    cluster_scripts.settle_record,
    cluster_scripts.reap_record,
]


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("row", [row for row in TRANSITIONS if row[1] is not Event.EXPIRE])
def test_a_script_holds_the_steps_of_its_table(
    build: Callable[[Transitions], Script], row: tuple[State, Event]
) -> None:
    step = f" {row[0].value}>{TRANSITIONS[row].value} "
    assert step in build(TRANSITIONS).source
    fewer = {kept: state for kept, state in TRANSITIONS.items() if kept != row}
    assert step not in build(fewer).source
    assert build(fewer).name != build(TRANSITIONS).name


def test_expiry_is_left_to_redis() -> None:
    assert "R> " not in scripts.steps_of(TRANSITIONS)
    assert "> " not in scripts.steps_of({(State.READY, Event.EXPIRE): State.GONE})
