"""The report as one HTML page that needs nothing else: no script, no font, no address outside it. Pure.

A single run is told whole; several begin with what sets them apart, and each follows whole.
"""

from __future__ import annotations

from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gateway.bench.report import figures, table
from gateway.bench.report.report import verdicts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gateway.bench.report.figures import Figure
    from gateway.bench.report.outcome import Run
    from gateway.bench.report.report import Report

    Row = tuple[str, str]

_GIB: Final = 1024**3
_COMPARED: Final = ("in flight", "samples", "samples/s", "p50", "p99", "CPU ms/sample", "Redis commands", "healthz p99")
_UNKNOWN: Final = "-"


def page(runs: Sequence[Run]) -> str:
    """HTML of at least one run."""
    title = "gateway bench"
    body = _sections(runs) if len(runs) > 1 else _run(runs[0])
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{title}</title><style>{_style()}</style></head><body>",
        f"<h1>{title}</h1>",
        f'<p class="muted">{escape(_headline(runs))}</p>',
        *body,
        *_facts(runs[0].report),
        "</body></html>\n",
    ]
    return "".join(parts)


@cache
def _style() -> str:
    # A file of its own, so that editors know what it is; read once.
    return Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def _headline(runs: Sequence[Run]) -> str:
    config = runs[0].report.config
    samples = sum(run.report.samples.requested for run in runs)
    told = (
        f"{samples:,} samples of {config['model']}, {config['prompt_tokens']:,} tokens in, {config['max_tokens']:,} out"
    )
    return told + (f", in {len(runs)} runs" if len(runs) > 1 else "")


# -- one run, and several


def _run(run: Run) -> list[str]:
    return [
        _verdict(run.report),
        _warnings(run.report.warnings),
        _tiles(run.report),
        _figures(figures.of_run(run)),
        _events(run.report),
        "<h2>Report</h2>",
        _pairs(row for row in table.rows(run.report) if row[0] != "warning"),
        _examples(run.report),
    ]


def _sections(runs: Sequence[Run]) -> list[str]:
    reports = [run.report for run in runs]
    parts = [_comparison(reports), _figures(figures.of_several(reports))]
    for run in runs:
        parts += [f"<section><h2>{run.report.config['concurrency']:,} in flight</h2>", *_run(run), "</section>"]
    return parts


def _comparison(reports: Sequence[Report]) -> str:
    head = "".join(f"<th>{name}</th>" for name in (*_COMPARED, "verdict"))
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(value)}</td>" for value in _compared(report)) + _verdict_cell(report) + "</tr>"
        for report in reports
    )
    return (
        f'<div class="card scroll"><table class="numbers"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div><p></p>"
    )


def _compared(report: Report) -> list[str]:
    latency, health = report.latency_s, report.gateway.healthz_ms
    return [
        f"{report.config['concurrency']:,}",
        f"{report.samples.completed:,}",
        f"{report.samples_per_second:,.0f}",
        figures.told_s(latency.p50) if latency else _UNKNOWN,
        figures.told_s(latency.p99) if latency else _UNKNOWN,
        _number(report.gateway.cpu_ms_per_sample, 2),
        _number(report.redis.commands_per_sample, 1),
        f"{health.p99:.1f} ms" if health else _UNKNOWN,
    ]


def _verdict_cell(report: Report) -> str:
    good = not verdicts(report)
    return f'<td class="{"ok" if good else "bad"}">{"OK" if good else "not OK"}</td>'


# -- parts


def _verdict(report: Report) -> str:
    return f'<p class="verdict {"bad" if verdicts(report) else "ok"}">{escape(table.verdict_line(report))}</p>'


def _warnings(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="warnings">{items}</ul>' if items else ""


def _tiles(report: Report) -> str:
    latency, health = report.latency_s, report.gateway.healthz_ms
    tiles = [
        (f"{report.samples.completed:,}", f"of {report.samples.requested:,} samples right"),
        (f"{report.samples_per_second:,.0f}", "samples per second"),
        (figures.told_s(latency.p50) if latency else _UNKNOWN, "latency, median"),
        (figures.told_s(latency.p99) if latency else _UNKNOWN, "latency, p99"),
        (_number(report.gateway.cpu_ms_per_sample, 2) + " ms", "worker CPU per sample"),
        (f"{health.p99:.1f} ms" if health else _UNKNOWN, "healthz, p99"),
    ]
    drawn = "".join(f'<div class="tile"><b>{escape(value)}</b><span>{what}</span></div>' for value, what in tiles)
    return f'<div class="tiles">{drawn}</div>'


def _figures(drawn: Iterable[Figure]) -> str:
    return f'<div class="figures">{"".join(map(_figure, drawn))}</div>'


def _figure(figure: Figure) -> str:
    keys = "".join(f'<span><i class="{kind}"></i>{escape(words)}</span>' for kind, words in figure.keys)
    return f'<figure><h3>{escape(figure.title)}</h3><div class="keys">{keys}</div>{figure.svg}</figure>'


def _events(report: Report) -> str:
    items = "".join(f"<li>{escape(figures.event_words(event))}</li>" for event in report.chaos)
    return f'<ol class="events">{items}</ol>' if items else ""


def _examples(report: Report) -> str:
    items = "".join(f"<p><code>{escape(example)}</code></p>" for example in report.examples)
    return f"<h3>Failures, for example</h3>{items}" if items else ""


def _facts(report: Report) -> list[str]:
    machine = report.machine
    memory = f"{machine.memory_bytes / _GIB:.1f} GiB"
    rows = [("CPUs", f"{machine.cpus}"), ("memory", memory), ("kernel", machine.kernel), ("Python", machine.python)]
    return [
        '<h2>Made with</h2><div class="facts">',
        _fact("Machine", rows),
        _fact("Versions", report.versions.items()),
        _fact("Config", _told(report.config)),
        "</div>",
    ]


def _fact(title: str, rows: Iterable[Row]) -> str:
    return f'<div class="card"><h3>{title}</h3><div class="scroll"><table>{_rows(rows)}</table></div></div>'


def _told(config: Mapping[str, Any]) -> list[Row]:
    """What was not given has a dash."""
    told = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in config.items()}
    return [(name, _UNKNOWN if config[name] in (None, "") else value) for name, value in told.items()]


def _pairs(rows: Iterable[Row]) -> str:
    return f'<div class="card scroll"><table class="pairs">{_rows(rows)}</table></div>'


def _rows(rows: Iterable[Row]) -> str:
    return "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)


def _number(value: float | None, digits: int) -> str:
    return _UNKNOWN if value is None else f"{value:,.{digits}f}"
