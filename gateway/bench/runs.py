"""Several runs as one report. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from gateway.bench import report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.bench.report import Report


class Runs(msgspec.Struct):
    """In the order in which they were run."""

    runs: list[report.Report]


def to_json(reports: Sequence[Report]) -> bytes:
    """A single report as it is; several as `{"runs": [...]}`."""
    if len(reports) == 1:
        return report.to_json(reports[0])
    return report.formatted(Runs(list(reports)))


def exit_code(reports: Sequence[Report]) -> int:
    """1 when one of them failed."""
    return max(map(report.exit_code, reports))
