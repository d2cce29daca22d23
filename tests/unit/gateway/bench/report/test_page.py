"""The page is complete, fetches nothing, and escapes every text of a run."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import msgspec
import pytest

from gateway.bench.report import figures
from gateway.bench.report.outcome import build_run
from gateway.bench.report.page import page
from gateway.bench.report.report import ChaosEvent
from gateway.bench.report.table import rows
from gateway.bench.watch.watch import Observations
from tests.bench_made import client, facts_of, measured_run

if TYPE_CHECKING:
    from gateway.bench.report.outcome import Run

# Elements that HTML ends by itself.
VOID = {"meta"}


class Reader(HTMLParser):
    """Collect texts, and fail at an element that is not closed properly."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def titles(run: Run) -> list[str]:
    return [figure.title for figure in figures.of_run(run)]


def with_report(run: Run, **values: object) -> Run:
    return replace(run, report=msgspec.structs.replace(run.report, **values))


def test_all_that_the_terminal_is_told_is_on_the_page() -> None:
    run = measured_run()
    texts = read(page([run])).texts
    for name, value in rows(run.report):
        assert name in texts
        assert value in texts
    assert {"Machine", "Versions", "Config", run.report.machine.kernel} <= set(texts)


def test_the_page_needs_nothing_from_elsewhere() -> None:
    reader = read(page([measured_run(), measured_run(20)]))
    assert {"script", "link", "img", "iframe", "object", "image", "use"}.isdisjoint(reader.tags)
    assert not [name for name, _ in reader.attributes if name in ("src", "href") or name.startswith("on")]
    assert not re.search(r"url\(|@import|https?://", page([measured_run()]))


def test_every_measurement_has_its_plot() -> None:
    run = measured_run()
    assert titles(run) == [
        "Latency: call to checked result",
        "Submit latency: post to promise",
        "Results per second",
        "Samples in flight",
        "healthz",
        "Cores in use",
    ]
    assert read(page([run])).tags.count("svg") == 6


def test_what_was_not_measured_has_no_plot() -> None:
    bare = build_run(facts_of(client()), Observations())
    assert titles(bare) == ["Results per second", "Samples in flight"]
    assert "None" not in "".join(read(page([bare])).texts)


def test_faults_are_marks_on_every_time_axis_and_told_in_words() -> None:
    events = [
        ChaosEvent(at_s=0.5, what="kill-worker", lasted_s=0, recovered_after_s=0.25),
        ChaosEvent(at_s=1.5, what="wipe-redis", lasted_s=1, recovered_after_s=None),
    ]
    run = with_report(measured_run(), chaos=events)
    drawn = {figure.title: figure.svg.count('<path class="event"') for figure in figures.of_run(run)}
    assert drawn == {title: 0 if "atency" in title else 2 for title in drawn}
    texts = read(page([run])).texts
    assert "kill-worker at 500 ms, served again after 250 ms" in texts
    assert "wipe-redis at 1.5 s, did not serve again before the end" in texts


def test_a_bad_run_is_called_so_and_its_failures_are_quoted() -> None:
    run = measured_run(failed=1, failures={"x": 1}, examples=["x: <b>bold</b> & more"])
    reader = read(page([run]))
    assert ("class", "verdict bad") in reader.attributes
    assert "x: <b>bold</b> & more" in reader.texts
    assert "b" not in {tag for tag, text in zip(reader.tags, reader.texts, strict=False) if text == "bold"}


def test_warnings_are_shown_once() -> None:
    html = page([with_report(measured_run(), warnings=["slow & busy"])])
    assert read(html).texts.count("slow & busy") == 1


def test_several_runs_are_compared_and_each_is_told() -> None:
    runs = [measured_run(512), measured_run(128), measured_run(2048)]
    reader = read(page(runs))
    assert reader.tags.count("section") == 3
    assert reader.tags.count("svg") == 2 + 3 * 6
    headings = [text for text in reader.texts if re.fullmatch(r"[\d,]+ in flight", text)]
    assert headings == ["512 in flight", "128 in flight", "2,048 in flight"]


def test_cpu_is_drawn_over_the_samples_in_flight_from_few_to_many() -> None:
    cpu, rate = figures.of_several([measured_run(512).report, measured_run(128).report])
    assert re.findall(r"<title>([^<]+)</title>", cpu.svg) == ["128: 10", "512: 10", "128: 2", "512: 2"]
    assert re.findall(r"<title>([^<]+)</title>", rate.svg) == ["128: 5", "512: 5"]


def test_runs_that_do_not_differ_in_flight_are_not_drawn_over_it() -> None:
    assert figures.of_several([measured_run(128).report, measured_run(128).report]) == []


@pytest.mark.parametrize(
    ("seconds", "told"), [(0, "0"), (0.0123456, "12.3 ms"), (1.5, "1.5 s"), (599, "599 s"), (1234.5, "1234 s")]
)
def test_times_are_short(seconds: float, told: str) -> None:
    assert figures.format_s(seconds) == told
