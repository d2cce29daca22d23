"""One run at a terminal: start what it needs, show progress, print the report, and clean up however it ends."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.bench.driver import drive
from gateway.bench.installation import running_stack
from gateway.bench.report.table import render, verdict_line
from shared.core.errors import StartError
from shared.system_error import system_reason

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping

    from gateway.bench.installation import Deployment
    from gateway.bench.load import messages
    from gateway.bench.report.outcome import Run
    from gateway.bench.report.report import Report
    from gateway.bench.scenario import Scenario

T = TypeVar("T")

# The SDK requires the prefix; a gateway without keys accepts any key.
ANY_KEY: Final = "tml-bench"
_LINE_EVERY_S: Final = 2.0


def run_to_end(work: Coroutine[None, None, T]) -> T:
    """Run `work` on a new event loop; SIGTERM unwinds it as Ctrl-C does. Raises `KeyboardInterrupt` on either."""
    return asyncio.run(_until_signal(work))


async def _until_signal(work: Coroutine[None, None, T]) -> T:
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        raise KeyboardInterrupt from None


async def self_contained(scenario: Scenario, console: Console) -> Run:
    """Start a simulator and a gateway for this run alone, and run it. Raises `StartError`."""
    workers = "1 worker" if scenario.workers == 1 else f"{scenario.workers} workers"
    console.print(f"starting a simulated vLLM and a gateway with {workers} ...", style="dim", highlight=False)
    async with running_stack(scenario) as deployment:
        return await against(scenario, deployment, console)


async def against(
    scenario: Scenario, deployment: Deployment, console: Console, model: str | None = None, api_key: str = ANY_KEY
) -> Run:
    """Run `scenario` against a running gateway. Without `model`, use the first one that it offers."""
    model = model or await offered_model(deployment.url, api_key)
    verify = scenario.verify if scenario.verify is not None else deployment.simulator_url is not None
    headline = f"{scenario.samples:,} samples of {model} through {deployment.url} (seed {scenario.seed})"
    headline += f", chaos {scenario.chaos}" * bool(scenario.chaos)
    console.print(headline, style="dim", highlight=False, soft_wrap=True)
    with live_progress(console, scenario.samples) as show:
        return await drive(scenario, deployment, model, api_key, verify=verify, show=show)


async def offered_model(url: str, api_key: str) -> str:
    """Return the first base model in the gateway's capabilities. Raises `StartError`."""
    try:
        async with (
            aiohttp.ClientSession(headers={"X-API-Key": api_key}) as session,
            session.get(f"{url}/api/v1/get_server_capabilities", timeout=aiohttp.ClientTimeout(total=30.0)) as response,
        ):
            body = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        reason = (system_reason(cause) if isinstance(cause, OSError) else str(cause)) or "no reply in time"
        raise StartError(f"no gateway answers at {url}: {reason}") from error
    if response.status != 200:
        raise StartError(f"the gateway at {url} answered {response.status} when asked for its models: {body}")
    return first_model(body, url)


def first_model(capabilities: Mapping[str, Any], url: str) -> str:
    for model in capabilities.get("supported_models") or ():
        if name := model.get("model_name"):
            return str(name)
    raise StartError(f"the gateway at {url} offers no model; name one with --model")


def print_report(report: Report, console: Console) -> None:
    console.print(render(report))
    for example in report.examples:
        console.print(f"  {example}", style="red", highlight=False, markup=False, soft_wrap=True)
    console.print(verdict_line(report), style="bold green" if verdict_line(report).startswith("OK") else "bold red")


def print_start_error(error: StartError) -> None:
    """Print the error with its line breaks, since it quotes the output of the process that did not start."""
    Console(stderr=True).print(f"gateway: {error}", style="red", highlight=False, markup=False, soft_wrap=True)


# -- progress


@contextmanager
def live_progress(console: Console, samples: int) -> Iterator[Callable[[messages.Progress], None]]:
    """Yield the function to call with the clients' total progress: a bar on a terminal, lines elsewhere."""
    if not console.is_terminal:
        yield LineProgress(console, samples, time.monotonic).show
        return
    columns = (
        TextColumn("[bold]samples"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("samples", total=samples, note="")
        yield lambda progress: bar.update(task, completed=progress.ended, note=_note(progress))


class LineProgress:
    """Print at most one line every two seconds, and never the same line twice in a row."""

    def __init__(self, console: Console, samples: int, monotonic_s: Callable[[], float]) -> None:
        self._console = console
        self._samples = samples
        self._monotonic_s = monotonic_s
        self._shown_s = monotonic_s()
        self._shown = ""

    def show(self, progress: messages.Progress) -> None:
        now_s = self._monotonic_s()
        text = f"{progress.ended:,} of {self._samples:,} samples, {_note(progress)}"
        if now_s - self._shown_s < _LINE_EVERY_S or text == self._shown:
            return
        self._shown_s, self._shown = now_s, text
        self._console.print(text, highlight=False)


def _note(progress: messages.Progress) -> str:
    parts = [f"{progress.submitted - progress.ended} in flight" if progress.submitted > progress.ended else ""]
    parts += [f"{progress.failed} failed" if progress.failed else ""]
    parts += [f"{progress.wrong} wrong" if progress.wrong else ""]
    return ", ".join(part for part in parts if part) or "starting"
