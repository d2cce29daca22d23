"""Write the report as one self-contained HTML page: no script, no font, no link to anything outside. Pure.

The page of several runs begins with a comparison; the full report of each run follows.
"""

from __future__ import annotations

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

# In a file of its own, so that editors treat it as CSS.
_STYLE: Final = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_GIB: Final = 1024**3
_COMPARED: Final = ("in flight", "samples", "samples/s", "p50", "p99", "CPU ms/sample", "Redis commands", "healthz p99")
_UNKNOWN: Final = "-"


def page(runs: Sequence[Run]) -> str:
    """Return the HTML page of one run or more."""
    title = "gateway bench"
    body = _sections(runs) if len(runs) > 1 else _run(runs[0])
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        f'<p class="muted">{escape(_headline(runs))}</p>',
        *body,
        *_facts(runs[0].report),
        "</body></html>\n",
    ]
    return "".join(parts)


def _headline(runs: Sequence[Run]) -> str:
    config = runs[0].report.config
    samples = sum(run.report.samples.requested for run in runs)
    tokens = f"{config['prompt_tokens']:,} tokens in, {config['max_tokens']:,} out"
    return f"{samples:,} samples of {config['model']}, {tokens}" + (f", in {len(runs)} runs" if len(runs) > 1 else "")


# -- one run, and several


def _run(run: Run) -> list[str]:
    report = run.report
    rows = _rows(row for row in table.rows(report) if row[0] != "warning")
    return [
        f'<p class="verdict {"bad" if verdicts(report) else "ok"}">{escape(table.verdict_line(report))}</p>',
        _list("ul", "warnings", report.warnings),
        _tiles(report),
        _figures(figures.of_run(run)),
        _list("ol", "events", map(figures.event_text, report.chaos)),
        f'<h2>Report</h2><div class="card scroll"><table class="pairs">{rows}</table></div>',
        "<h3>Examples of failures</h3>" * bool(report.examples),
        *(f"<p><code>{escape(example)}</code></p>" for example in report.examples),
    ]


def _sections(runs: Sequence[Run]) -> list[str]:
    reports = [run.report for run in runs]
    parts = [_comparison(reports), _figures(figures.of_several(reports))]
    for run in runs:
        parts += [f"<section><h2>{run.report.config['concurrency']:,} in flight</h2>", *_run(run), "</section>"]
    return parts


def _comparison(reports: Sequence[Report]) -> str:
    head = "".join(f"<th>{name}</th>" for name in (*_COMPARED, "verdict"))
    rows = ""
    for report in reports:
        cells = "".join(f"<td>{escape(value)}</td>" for value in _compared(report))
        verdict = '<td class="bad">not OK</td>' if verdicts(report) else '<td class="ok">OK</td>'
        rows += f"<tr>{cells}{verdict}</tr>"
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
        figures.format_s(latency.p50) if latency else _UNKNOWN,
        figures.format_s(latency.p99) if latency else _UNKNOWN,
        _number(report.gateway.cpu_ms_per_sample, 2),
        _number(report.redis.commands_per_sample, 1),
        f"{health.p99:.1f} ms" if health else _UNKNOWN,
    ]


# -- parts


def _list(tag: str, kind: str, sentences: Iterable[str]) -> str:
    """Return a list of class `kind`, or nothing if there are no sentences."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<{tag} class="{kind}">{items}</{tag}>' if items else ""


def _tiles(report: Report) -> str:
    latency, health = report.latency_s, report.gateway.healthz_ms
    tiles = [
        (f"{report.samples.completed:,}", f"of {report.samples.requested:,} samples right"),
        (f"{report.samples_per_second:,.0f}", "samples per second"),
        (figures.format_s(latency.p50) if latency else _UNKNOWN, "latency, median"),
        (figures.format_s(latency.p99) if latency else _UNKNOWN, "latency, p99"),
        (_number(report.gateway.cpu_ms_per_sample, 2) + " ms", "worker CPU per sample"),
        (f"{health.p99:.1f} ms" if health else _UNKNOWN, "healthz, p99"),
    ]
    drawn = "".join(f'<div class="tile"><b>{escape(value)}</b><span>{what}</span></div>' for value, what in tiles)
    return f'<div class="tiles">{drawn}</div>'


def _figures(drawn: Iterable[Figure]) -> str:
    parts = []
    for figure in drawn:
        keys = "".join(f'<span><i class="{kind}"></i>{escape(label)}</span>' for kind, label in figure.keys)
        title = escape(figure.title)
        parts.append(f'<figure><h3>{title}</h3><div class="keys">{keys}</div>{figure.svg}</figure>')
    return f'<div class="figures">{"".join(parts)}</div>'


def _facts(report: Report) -> list[str]:
    machine = report.machine
    memory = f"{machine.memory_bytes / _GIB:.1f} GiB"
    rows = [("CPUs", f"{machine.cpus}"), ("memory", memory), ("kernel", machine.kernel), ("Python", machine.python)]
    facts = (("Machine", rows), ("Versions", report.versions.items()), ("Config", _config_rows(report.config)))
    return [
        '<h2>Made with</h2><div class="facts">',
        *(
            f'<div class="card"><h3>{title}</h3><div class="scroll"><table>{_rows(pairs)}</table></div></div>'
            for title, pairs in facts
        ),
        "</div>",
    ]


def _config_rows(config: Mapping[str, Any]) -> list[Row]:
    """Format the scenario; a value that is not set becomes a dash."""
    texts = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in config.items()}
    return [(name, _UNKNOWN if config[name] in (None, "") else text) for name, text in texts.items()]


def _rows(rows: Iterable[Row]) -> str:
    return "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)


def _number(value: float | None, digits: int) -> str:
    return _UNKNOWN if value is None else f"{value:,.{digits}f}"
