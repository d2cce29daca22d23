"""One run at a terminal: start what is needed, show progress, print the report, and clean up on any way out."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from gateway.bench.driver import drive
from gateway.bench.offered import offered_model
from gateway.bench.progress import live_progress
from gateway.bench.stack import running_stack
from gateway.bench.table import render, verdict_line

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from gateway.bench.outcome import Run
    from gateway.bench.report import Report
    from gateway.bench.scenario import Scenario
    from gateway.bench.stack import Deployment
    from shared.core.errors import StartError

T = TypeVar("T")

# The SDK demands the prefix; a gateway without keys takes any.
ANY_KEY = "tml-bench"


def run_to_end(work: Coroutine[None, None, T]) -> T:
    """Runs `work`; SIGTERM unwinds it as Ctrl-C does. Raises `KeyboardInterrupt` on either."""
    return asyncio.run(_until_signal(work))


async def self_contained(scenario: Scenario, console: Console) -> Run:
    """Starts simulator and gateway for this run alone. Raises `StartError`."""
    workers = "1 worker" if scenario.workers == 1 else f"{scenario.workers} workers"
    console.print(f"starting a simulated vLLM and a gateway with {workers} ...", style="dim", highlight=False)
    async with running_stack(scenario) as deployment:
        return await against(scenario, deployment, console)


async def against(
    scenario: Scenario, deployment: Deployment, console: Console, model: str | None = None, api_key: str = ANY_KEY
) -> Run:
    """Drives `scenario` against what runs already. `model`: None takes the first that is offered."""
    model = model or await offered_model(deployment.url, api_key)
    verify = scenario.verify if scenario.verify is not None else deployment.simulator_url is not None
    told = f"{scenario.samples:,} samples of {model} through {deployment.url} (seed {scenario.seed})"
    told += f", chaos {scenario.chaos}" * bool(scenario.chaos)
    console.print(told, style="dim", highlight=False, soft_wrap=True)
    with live_progress(console, scenario.samples) as show:
        return await drive(scenario, deployment, model, api_key, verify=verify, show=show)


def print_report(report: Report, console: Console) -> None:
    console.print(render(report))
    for example in report.examples:
        console.print(f"  {example}", style="red", highlight=False, markup=False, soft_wrap=True)
    console.print(verdict_line(report), style="bold green" if verdict_line(report).startswith("OK") else "bold red")


def print_start_error(error: StartError) -> None:
    """Whole, with its line breaks: it quotes what the process that did not start had to say."""
    Console(stderr=True).print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)


async def _until_signal(work: Coroutine[None, None, T]) -> T:
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        raise KeyboardInterrupt from None
