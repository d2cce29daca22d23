"""The model that a run takes by itself, and how it shows progress."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gateway.bench.load.messages import Progress
from gateway.bench.run import LineProgress, first_model, live_progress
from shared.clock import ManualClock
from shared.core.errors import StartError


def test_the_first_that_has_a_name() -> None:
    assert first_model({"supported_models": [{}, {"model_name": "a"}, {"model_name": "b"}]}, "u") == "a"


@pytest.mark.parametrize("capabilities", [{}, {"supported_models": []}, {"supported_models": None}])
def test_a_gateway_without_models_is_named(capabilities: dict[str, object]) -> None:
    with pytest.raises(StartError, match="the gateway at u offers no model; name one with --model"):
        first_model(capabilities, "u")


def test_at_most_one_line_every_two_seconds_and_none_twice() -> None:
    clock, output = ManualClock(), io.StringIO()
    lines = LineProgress(Console(file=output, width=120), 100, clock.monotonic_s)
    for submitted, completed in ((10, 0), (40, 10), (60, 30), (60, 30), (100, 97)):
        lines.show(Progress(submitted, completed, failed=1, wrong=0, cancelled=0))
        clock.advance(1.5)
    assert output.getvalue().splitlines() == [
        "31 of 100 samples, 29 in flight, 1 failed",
        "98 of 100 samples, 2 in flight, 1 failed",
    ]


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    output = io.StringIO()
    with live_progress(Console(file=output, force_terminal=True, width=100), 10) as show:
        show(Progress(10, 4, 0, 0, 0))
    assert "4/10" in output.getvalue()


def test_a_pipe_gets_lines() -> None:
    with live_progress(Console(file=io.StringIO()), 10) as show:
        show(Progress(10, 4, 0, 0, 0))
