"""Which model a gateway offers, when nobody named one.

One run at a terminal: start what is needed, show progress, print the report, and clean up on any way out.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
from rich.console import Console

from gateway.bench.driver import drive
from gateway.bench.installation import running_stack
from gateway.bench.report.progress import live_progress
from gateway.bench.report.table import render, verdict_line
from shared.core.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from gateway.bench.installation import Deployment
    from gateway.bench.report.outcome import Run
    from gateway.bench.report.report import Report
    from gateway.bench.scenario import Scenario


async def offered_model(url: str, api_key: str) -> str:
    """The first base model in the gateway's capabilities. Raises `StartError`."""
    try:
        async with (
            aiohttp.ClientSession(headers={"X-API-Key": api_key}) as session,
            session.get(f"{url}/api/v1/get_server_capabilities", timeout=aiohttp.ClientTimeout(total=30.0)) as response,
        ):
            body = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise StartError(f"no gateway answers at {url}: {_reason(error)}") from error
    if response.status != 200:
        raise StartError(f"the gateway at {url} answered {response.status} when asked for its models: {body}")
    return first_model(body, url)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error) or "no reply in time"


def first_model(capabilities: Mapping[str, Any], url: str) -> str:
    for model in capabilities.get("supported_models") or ():
        if name := model.get("model_name"):
            return str(name)
    raise StartError(f"the gateway at {url} offers no model; name one with --model")


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
