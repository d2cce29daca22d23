"""Counts of keys outlive the processes that reported them, and end with the key's entry in the file."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from gateway.admin.key_ledger import KeyLedger, KeyView
from shared.channel import KeyStatus, Status
from tests.gateway_views import worker_status

ALICE = KeyStatus("alice", in_flight=2, in_flight_bytes=20, samples=5, rejected=1)
BOB = KeyStatus("bob", in_flight=1, in_flight_bytes=9, samples=1, rejected=0)


def status_of(*keys: KeyStatus) -> Status:
    return msgspec.structs.replace(worker_status("up"), keys=keys)


def test_two_workers_are_added_up_and_who_asked_for_nothing_is_there() -> None:
    ledger = KeyLedger()
    ledger.update(1, [ALICE])
    ledger.update(2, [ALICE, BOB])
    alice, bob, carol = ledger.views(["alice", "bob", "carol"], [status_of(ALICE), status_of(ALICE, BOB)])
    assert alice == KeyView("alice", in_flight=4, in_flight_bytes=40, samples=10, rejected=2)
    assert bob == KeyView("bob", in_flight=1, in_flight_bytes=9, samples=1, rejected=0)
    assert carol == KeyView("carol", 0, 0, 0, 0)


def test_a_replaced_worker_counts_from_zero_and_nothing_falls() -> None:
    ledger = KeyLedger()
    ledger.update(1, [ALICE])
    ledger.forget(1)
    (alone,) = ledger.views(["alice"], [])
    assert alone == KeyView("alice", 0, 0, samples=5, rejected=1)
    ledger.update(2, [msgspec.structs.replace(ALICE, samples=1, rejected=0)])
    (alice,) = ledger.views(["alice"], [])
    assert alice == replace(alone, samples=6)


def test_who_is_taken_out_of_the_file_is_shown_no_more() -> None:
    ledger = KeyLedger()
    ledger.update(1, [ALICE, BOB])
    assert [view.name for view in ledger.views(["bob"], [status_of(ALICE, BOB)])] == ["bob"]
