"""Run many chaos runs with different seeds, to see whether anything is ever lost, wrong, or executed too often.

    python benchmarks/chaos_soak.py --runs 50 --first-seed 1 --minutes 30

Each run is `gateway bench --chaos random --seed N`; the two ways of waiting take turns. It prints a line for each run
and one for all of them. For a failed run it prints the command: the same seed breaks the same things at the same times.
Exit code 1 if any run failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.tables import say

LOAD = ["--gen-seconds", "1", "--abandon-polls", "0.2", "--cancel", "0.02", "--duplicates", "0.05"]


def main() -> int:
    options = arguments()
    deadline_s = time.monotonic() + options.minutes * 60
    recoveries: defaultdict[str, list[float]] = defaultdict(list)
    totals: defaultdict[str, int] = defaultdict(int)
    for seed in range(options.first_seed, options.first_seed + options.runs):
        if time.monotonic() > deadline_s:
            break
        command = bench_command(options, seed)
        code, report = run(command, options.timeout)
        totals["runs"] += 1
        totals["failed runs"] += code != 0
        say(f"seed {seed}: exit {code}; {headline(report)}")
        if code != 0:
            say(f"  repeat with: {' '.join(command)}")
        add_up(report, totals, recoveries)
    say(", ".join(f"{name} {count:,}" for name, count in totals.items()))
    for what, values in sorted(recoveries.items()):
        median_s = statistics.median(values)
        say(f"{what}: {len(values)} times, recovered after {median_s:.2f} s (median), {max(values):.2f} s (longest)")
    return 1 if totals["failed runs"] else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run after this long")
    parser.add_argument("--samples", type=int, default=2_000)
    parser.add_argument("--concurrency", type=int, default=500)
    parser.add_argument("--chaos", default="random", help="as for `gateway bench`")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for one run")
    return parser.parse_args()


def bench_command(options: argparse.Namespace, seed: int) -> list[str]:
    waiting = "--session-poll" if seed % 2 else "--no-session-poll"
    size = ["--samples", str(options.samples), "--concurrency", str(options.concurrency)]
    return ["gateway", "bench", *size, *LOAD, waiting, "--chaos", options.chaos, "--seed", str(seed)]


def run(command: list[str], timeout_s: float) -> tuple[int, dict[str, Any] | None]:
    """Return the exit code (124 for a time-out) and the report, if there is one."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "report.json"
        full_command = [sys.executable, "-m", *command, "--json", str(path)]
        try:
            code = subprocess.run(full_command, capture_output=True, timeout=timeout_s, check=False).returncode
        except subprocess.TimeoutExpired:
            code = 124
        return code, json.loads(path.read_text()) if path.exists() else None


def headline(report: dict[str, Any] | None) -> str:
    if report is None:
        return "no report"
    samples, simulator = report["samples"], report["simulator"]
    broken = ", ".join(f"{event['what']}@{event['at_s']:.1f}" for event in report["chaos"])
    ended = f"{samples['completed']} ok, {samples['failed']} failed, {samples['wrong']} wrong, {lost(samples)} lost"
    executed = f"executed {simulator['executions']} times, {simulator['allowed_executions']} allowed"
    twice = f"{simulator['concurrent_duplicates']} at the same time"
    again = f"{samples['resubmitted']} resubmitted"
    return f"{ended}, {again}; {executed}, {twice}; {report['seconds']:.1f} s; {broken}"


def lost(samples: dict[str, int]) -> int:
    return samples["requested"] - samples["completed"] - samples["failed"] - samples["cancelled"]


def add_up(
    report: dict[str, Any] | None, totals: defaultdict[str, int], recoveries: defaultdict[str, list[float]]
) -> None:
    if report is None:
        return
    for name in ("requested", "completed", "cancelled", "failed", "wrong", "resubmitted"):
        totals[name] += report["samples"][name]
    totals["lost"] += lost(report["samples"])
    totals["executed twice at once"] += report["simulator"]["concurrent_duplicates"]
    totals["faults"] += len(report["chaos"])
    for event in report["chaos"]:
        if event["recovered_after_s"] is not None:
            recoveries[event["what"]].append(event["recovered_after_s"])


if __name__ == "__main__":
    sys.exit(main())
