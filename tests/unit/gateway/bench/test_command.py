"""The flags of both commands; tests/system runs the commands."""

from __future__ import annotations

import click
import pytest

from gateway.bench.command import Counts, bench
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


def test_counts_are_one_or_several() -> None:
    assert Counts().convert("512", None, None) == [512]
    assert Counts().convert("1, 20,300", None, None) == [1, 20, 300]


@pytest.mark.parametrize("text", ["", "0", "1,", "-3", "x", "1.5", "5,0"])
def test_what_is_no_count_is_named(text: str) -> None:
    with pytest.raises(click.BadParameter, match="at least 1"):
        Counts().convert(text, None, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--client", "sdk"], "--client sdk"),
        (["--sdk-python", "x"], "--sdk-python"),
        (["--json", "/no/such/directory/x.json"], "--json /no/such/directory/x.json: cannot be written"),
        (["--html", "/no/such/directory/x.html"], "--html /no/such/directory/x.html: cannot be written"),
        (["--url", "https://h"], "--url 'https://h'"),
        (["--heartbeat-seconds", "0"], "--heartbeat-seconds 0.0"),
    ],
)
def test_what_cannot_be_run_is_named_before_anything_starts(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bench.main(arguments, standalone_mode=False)
