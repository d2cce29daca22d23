"""Run `gateway bench` for the rows, and write the results as tables."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.macro.rows import judge
from benchmarks.tables import markdown
from benchmarks.turns import WrongResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.macro.rows import Reports, Row, Target, Verdict

_TIMEOUT_S = 1_200.0


def run_rows(
    rows: Sequence[Row], rounds: int, *, quick: bool, say: Callable[[str], None]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a name and a report per row and round; the rows take turns. Raises `WrongResult` if a run fails."""
    for number in range(rounds):
        for row in rows:
            report = run_row(row.quick() if quick else row)
            say(f"round {number + 1}, {row.name}: {headline(report)}")
            yield row.name, report


def run_row(row: Row, checkout: Path | None = None) -> dict[str, Any]:
    """Return the report of one run, by the gateway of `checkout` and its own `.venv` (None: this one)."""
    python = sys.executable if checkout is None else str(checkout / ".venv" / "bin" / "python")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "report.json"
        command = [python, "-m", "gateway", "bench", *row.arguments(), "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, cwd=checkout)
        if done.returncode != 0:
            shown = f"gateway bench {' '.join(row.arguments())}"
            raise WrongResult(f"{shown}\nended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        report: dict[str, Any] = json.loads(path.read_text())
        return report


def headline(report: dict[str, Any]) -> str:
    gateway = report["gateway"]
    return (
        f"{report['samples']['completed']:,} right, {gateway['cpu_ms_per_sample']:.3f} ms of worker CPU each, "
        f"{report['samples_per_second']:,.0f} per second"
    )


def targets_table(targets: Sequence[Target], reports: Reports) -> str:
    """Write the verdict on each target whose row was run."""
    verdicts = [judge(target, reports) for target in targets if reports.get(target.row)]
    return markdown(("what", "target", "least", "median", "met"), [_verdict_row(verdict) for verdict in verdicts])


def _verdict_row(verdict: Verdict) -> list[str]:
    target = verdict.target
    limit = _shown(verdict.limit, target.unit)
    if target.relative_to is not None:
        limit = f"{target.limit:g} x {target.relative_to}: {limit}"
    met = {True: "yes", False: "no", None: "?"}[verdict.met]
    return [target.what, limit, _shown(verdict.least, target.unit), _shown(verdict.median, target.unit), met]


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "not measured"
    number = f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
    return f"{number} {unit}".rstrip()


def details_table(reports: Reports) -> str:
    """Write the other figures of each row's run with the least CPU."""
    header = ("run", "CPU of workers", "client", "Redis", "commands", "largest worker", "healthz p99", "samples/s")
    return markdown(header, [_details_row(name, best(found)) for name, found in reports.items() if found])


def best(reports: Sequence[Any]) -> Any:
    return min(reports, key=lambda report: report["gateway"]["cpu_ms_per_sample"] or 0.0)


def _details_row(name: str, report: dict[str, Any]) -> list[str]:
    gateway, redis, completed = report["gateway"], report["redis"], report["samples"]["completed"]
    redis_us = None if redis["cpu_seconds"] is None else redis["cpu_seconds"] * 1e6 / completed
    return [
        name,
        _shown(gateway["cpu_ms_per_sample"], "ms"),
        _shown(report["client"]["cpu_ms_per_sample"], "ms"),
        _shown(redis_us, "us"),
        _shown(redis["commands_per_sample"], ""),
        _shown(gateway["peak_rss_bytes_per_worker"] / 2**20, "MiB"),
        _shown((gateway["healthz_ms"] or {}).get("p99"), "ms"),
        f"{report['samples_per_second']:,.0f}",
    ]
