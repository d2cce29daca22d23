"""The flags of both commands; tests/system runs the commands."""

from __future__ import annotations

import click
import pytest

from gateway.bench.command import bench
from gateway.bench.demo import demo
from gateway.bench.scenario import Scenario
from shared.core.errors import ConfigError


def test_every_part_of_a_scenario_has_a_flag() -> None:
    flags = {parameter.name for parameter in bench.params}
    assert flags >= set(Scenario.__struct_fields__)


def test_the_demo_needs_no_arguments() -> None:
    assert not any(parameter.required for parameter in demo.params)


def test_the_help_tells_that_tls_is_not_spoken() -> None:
    with click.Context(bench) as context:
        assert "http:// only" in bench.get_help(context)


def concurrency(text: str) -> list[list[int]]:
    context = bench.make_context("bench", ["--concurrency", text])
    given: list[list[int]] = context.params["concurrency"]
    return given


def test_counts_are_one_or_several() -> None:
    assert list(concurrency("512")) == [[512]]
    assert list(concurrency("1, 20,300")) == [[1, 20, 300]]


@pytest.mark.parametrize("text", ["", "0", "1,", "-3", "x", "1.5", "5,0"])
def test_what_is_no_count_is_named(text: str) -> None:
    with pytest.raises(click.BadParameter, match="at least 1"):
        concurrency(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--client", "sdk"], "--client sdk"),
        (["--sdk-python", "x"], "--sdk-python"),
        (["--json", "/no/such/directory/x.json"], "--json: '/no/such/directory/x.json' cannot be written"),
        (["--html", "/no/such/directory/x.html"], "--html: '/no/such/directory/x.html' cannot be written"),
        (["--url", "https://h"], "--url: 'https://h'"),
    ],
)
def test_what_cannot_be_run_is_named_before_anything_starts(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bench.main(arguments, standalone_mode=False)
