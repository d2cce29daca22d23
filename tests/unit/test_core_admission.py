"""Admission: one row per signal."""

from __future__ import annotations

import pytest

from shared.core.admission import Limits, Load, admit

LIMITS = Limits(max_in_flight=10, max_in_flight_bytes=1000)


@pytest.mark.parametrize(
    ("load", "sample_bytes", "reason"),
    [
        (Load(0, 0), 1, None),
        (Load(9, 900), 100, None),
        (Load(10, 0), 1, "in_flight"),
        (Load(1, 950), 51, "bytes"),
        (Load(0, 0), 5000, None),
        (Load(0, 0, store_full=True), 1, "store_full"),
        (Load(0, 0, draining=True), 1, "draining"),
        (Load(0, 0, store_refilling=True), 1, "store_refilling"),
        (Load(10, 1000, store_full=True, draining=True), 1, "draining"),
    ],
)
def test_one_row_per_signal(load: Load, sample_bytes: int, reason: str | None) -> None:
    rejection = admit(load, LIMITS, sample_bytes)
    assert (rejection.reason if rejection else None) == reason
