"""Compare the worker CPU of a small sample in two checkouts, in runs that take turns: before, after, before, after ...

    python -m benchmarks.pairs BEFORE AFTER [--pairs 6] [--samples 20480]

BEFORE and AFTER are folders, each a checkout with its own `.venv`. Each run is `gateway bench` of that checkout, which
starts its own gateway, simulated vLLM and load client, and checks every sample. Other programs slow a machine down from
one minute to the next, so only the ratio within a pair counts. The load client's CPU is the control: it does the same
work in both runs, so a pair whose control is far from 1 was disturbed (or the load client differs too).

Exit code 1 if a run fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.macro.bench_runs import run_row
from benchmarks.macro.rows import Row
from benchmarks.tables import markdown, say
from benchmarks.turns import WrongResult

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER = ("pair", "before, ms", "after, ms", "after / before", "client before, ms", "client after, ms", "control")


@dataclass(frozen=True, slots=True)
class Run:
    """CPU per sample of one run, in ms: the gateway's workers, and the load client."""

    worker_ms: float
    client_ms: float


@dataclass(frozen=True, slots=True)
class Pair:
    before: Run
    after: Run

    @property
    def ratio(self) -> float:
        return self.after.worker_ms / self.before.worker_ms

    @property
    def control(self) -> float:
        return self.after.client_ms / self.before.client_ms


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    row = Row("pairs", options.concurrency, options.samples)
    pairs: list[Pair] = []
    try:
        for number in range(options.pairs):
            pair = Pair(measured(row, options.before), measured(row, options.after))
            pairs.append(pair)
            say(f"pair {number + 1} of {options.pairs}: ratio {pair.ratio:.3f}, control {pair.control:.3f}")
    except WrongResult as error:
        say(f"WRONG: {error}")
        return 1
    say("\n" + pairs_table(pairs))
    say(f"\n{summary(pairs)}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--samples", type=int, default=20_480, help="per run")
    parser.add_argument("--concurrency", type=int, default=512, help="samples in flight")
    return parser.parse_args(arguments)


def measured(row: Row, checkout: Path) -> Run:
    try:
        report = run_row(row, checkout.absolute())
    except OSError as error:
        raise WrongResult(f"{checkout} cannot run `gateway bench`: {error}") from None
    return Run(report["gateway"]["cpu_ms_per_sample"], report["client"]["cpu_ms_per_sample"])


def pairs_table(pairs: Sequence[Pair]) -> str:
    rows = [
        [
            str(number),
            f"{pair.before.worker_ms:.4f}",
            f"{pair.after.worker_ms:.4f}",
            f"{pair.ratio:.3f}",
            f"{pair.before.client_ms:.4f}",
            f"{pair.after.client_ms:.4f}",
            f"{pair.control:.3f}",
        ]
        for number, pair in enumerate(pairs, 1)
    ]
    return markdown(HEADER, rows)


def summary(pairs: Sequence[Pair]) -> str:
    """Return the median and the spread of the ratios, and of the control."""
    texts = []
    for what, values in (
        ("after / before", [pair.ratio for pair in pairs]),
        ("control", [pair.control for pair in pairs]),
    ):
        texts.append(f"{what}: median {statistics.median(values):.3f}, {min(values):.3f} to {max(values):.3f}")
    return f"{len(pairs)} pairs. " + "; ".join(texts)


if __name__ == "__main__":
    sys.exit(main())
