"""Completion logs: entries are read as they were written, and cursors are mixed with the server's run id."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.lifecycle import State
from shared.core.model import MAX_SEQ_ID, SampleKey
from shared.store import schema
from shared.store.contract import LogEntry, LogPage


@given(st.integers(0, MAX_SEQ_ID), st.sampled_from(State), st.integers(0, 2**40))
def test_an_entry_reads_as_it_was_written(seq_id: int, state: State, size_bytes: int) -> None:
    entry = schema.log_entry(SampleKey("K", seq_id), state, size_bytes, 1_790_000_000_000)
    finished = state in (State.READY, State.RETRIEVED)
    expected = LogEntry(seq_id, finished, size_bytes if finished else 0)
    assert schema.log_page([1, 5, 1, [entry]], 0).entries == [expected]


def test_a_page_without_entries_keeps_a_cursor_that_is_known() -> None:
    cursor = (5 << schema.SEQ_BITS) + 3
    assert schema.log_page([1, 5, 3, []], cursor) == LogPage([], cursor)
    assert schema.log_page([0, 5, 3, []], cursor) == LogPage([], 0)
    assert schema.log_page([], cursor) == LogPage([], 0)


@pytest.mark.parametrize("entry", [b"", b"F 1 2", b"F 1 2 3 4", b"F x 2 3", b"\xff 1 2 3"])
def test_what_is_no_entry_is_left_out_and_counted(entry: bytes) -> None:
    page = schema.log_page([1, 5, 3, [b"F 1 2 3", entry, b"X 2 0 3"]], 0)
    assert page == LogPage([LogEntry(1, True, 2), LogEntry(2, False, 0)], (5 << schema.SEQ_BITS) + 3, unreadable=1)


def test_another_run_of_a_server_gives_another_cursor() -> None:
    page = [1, 5, 1, [b"F 1 2 3"]]
    runs = [schema.run_number(run_id) for run_id in (b"0123456789", b"f123456789")]
    cursors = {schema.log_page(page, 0, run).cursor for run in runs}
    assert cursors == {((5 ^ run) << schema.SEQ_BITS) + 1 for run in runs}
    assert len(cursors) == 2


@pytest.mark.parametrize(("run_id", "number"), [(b"", 0), (b"abc", 0), (b"xyzuvw", 0), (b"00010ffff", 16)])
def test_a_server_that_tells_no_run_id_counts_as_the_same(run_id: bytes, number: int) -> None:
    assert schema.run_number(run_id) == number
