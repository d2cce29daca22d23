"""Which seq_ids may have been lost with a log, told from those that are known."""

from __future__ import annotations

import pytest

from shared.core.model import CLONE_SPAN
from shared.store.contract import LogPage
from workers.api import lost_results


def test_nothing_known_is_nothing_in_doubt() -> None:
    assert list(lost_results.doubtful(())) == []


def test_in_doubt_is_what_lies_between_and_close_to_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_results, "_AHEAD", 2)
    assert list(lost_results.doubtful({10, 14})) == [6, 7, 8, 9, 11, 12, 13, 15, 16]
    assert list(lost_results.doubtful({2, 6})) == [0, 1, 3, 4, 5, 7, 8]


def test_a_clone_has_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_results, "_AHEAD", 0)
    base = 7 * CLONE_SPAN
    assert list(lost_results.doubtful({base + 1, base + 3})) == [base, base + 2]


def test_one_old_sample_does_not_bring_up_all_since() -> None:
    assert len(list(lost_results.doubtful({5, 400_000_000}))) < 140_000


@pytest.mark.parametrize(
    ("prev_cursor", "cursor", "anew"),
    [
        (0, (9 << 32) + 4, False),  # its first poll
        ((9 << 32) + 2, (9 << 32) + 4, False),
        ((9 << 32) + 4, (9 << 32) + 4, False),
        ((8 << 32) + 4, (9 << 32) + 1, True),
        ((8 << 32) + 4, 0, True),  # there is no log at all any more
    ],
)
def test_a_log_that_began_anew(prev_cursor: int, cursor: int, anew: bool) -> None:
    assert lost_results.began_anew(prev_cursor, LogPage([], cursor)) is anew
