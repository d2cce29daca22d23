"""`gateway bench`: the load harness at the command line."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from gateway.bench import scenario as sdk_python
from gateway.bench.installation import Deployment
from gateway.bench.load.transport import parse_address
from gateway.bench.report.page import page
from gateway.bench.report.report import runs_exit_code, runs_to_json
from gateway.bench.run import ANY_KEY, against, print_report, print_start_error, run_to_end, self_contained
from gateway.bench.scenario import PRESETS, resolve_all
from shared.core.errors import ConfigError, StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from gateway.bench.report.outcome import Run
    from gateway.bench.scenario import Scenario


class Counts(click.ParamType[list[int]]):
    """Counts, comma separated."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        parts = str(value).split(",")
        if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
            self.fail(f"{value!r}: must be a number of at least 1, or several, comma separated", param, ctx)
        return [int(part) for part in parts]


_FRACTION = click.FloatRange(0.0, 1.0)
_COUNT = click.IntRange(1)

# What decides the scenario; a flag that is not given leaves the preset's value, or the default.
_SCENARIO_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--samples", type=_COUNT, help="Samples in all. [default: 2048]"),
    click.option(
        "--concurrency",
        type=Counts(),
        multiple=True,
        metavar="N[,N...]",
        help="Samples in flight at once; of several, each is a run of its own, with ten times as many samples unless "
        "--samples is given. [default: all, up to 2048]",
    ),
    click.option("--prompt-tokens", type=_COUNT, help="Length of each prompt. [default: 64]"),
    click.option("--max-tokens", type=_COUNT, help="Length of each result. [default: 32]"),
    click.option("--num-samples", type=_COUNT, help="Sequences per sample. [default: 1]"),
    click.option(
        "--client",
        type=click.Choice(["raw", "sdk"]),
        help="What makes the load: our own client, which behaves like the SDK at a fraction of its cost, or the "
        "published SDK. [default: raw]",
    ),
    click.option(
        "--sdk-python",
        metavar="PATH",
        help="With --client sdk: the Python of an environment that has the package tinker. [default: this one's]",
    ),
    click.option("--client-processes", type=_COUNT, help="Load client processes. [default: 1]"),
    click.option(
        "--session-poll/--no-session-poll",
        default=None,
        help="One poll per session, or one per sample. [default: what the gateway offers]",
    ),
    click.option(
        "--vllm-mode",
        type=click.Choice(["barrier", "latency", "instant"]),
        help="How the simulated vLLM spends its time. [default: latency]",
    ),
    click.option("--gen-seconds", type=click.FloatRange(0.0), help="Length of a simulated generation. [default: 1]"),
    click.option("--max-num-seqs", type=_COUNT, help="Generations that the simulated vLLM runs at once."),
    click.option("--simulator-processes", type=_COUNT, help="Processes of the simulated vLLM. [default: 1]"),
    click.option("--workers", type=_COUNT, help="Worker processes of the gateway. [default: 2]"),
    click.option("--source-ips", metavar="LIST", help="Source addresses of the workers, as in `gateway serve`."),
    click.option("--abandon-polls", type=_FRACTION, help="Fraction of polls dropped half-way. [default: 0]"),
    click.option("--cancel", type=_FRACTION, help="Fraction of samples cancelled. [default: 0]"),
    click.option(
        "--duplicates",
        type=_FRACTION,
        help="Fraction of samples submitted twice: at once on two connections, or after a lost reply. [default: 0]",
    ),
    click.option("--heartbeat-seconds", type=float, help="Between two heartbeats of a client process. [default: 10]"),
    click.option(
        "--verify/--no-verify",
        default=None,
        help="Compare every token with the simulated vLLM's. [default: only where bench started the simulated vLLM]",
    ),
    click.option(
        "--chaos",
        metavar="PLAN",
        help="What to break, in seconds after the first sample: kill-worker@5,restart-redis@10,wipe-redis@12,"
        "stall-redis@14,kill-upstream@16; or random, or random@SECONDS, drawn from --seed. Not with --url.",
    ),
    click.option("--seed", type=click.IntRange(0), help="Decides prompts and trouble. [default: drawn and printed]"),
]


def _scenario_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_SCENARIO_OPTIONS):
        function = option(function)
    return function


@click.command()
@click.option("--preset", type=click.Choice(sorted(PRESETS)), help="A whole scenario; other flags change parts of it.")
@click.option(
    "--url",
    metavar="URL",
    help="A running gateway, http:// only: not by TLS. Without it, bench starts one and a simulated vLLM.",
)
@click.option("--admin", metavar="URL", help="With --url: its admin address, for CPU, memory and Redis figures.")
@click.option("--simulator", metavar="URL", help="With --url: the simulated vLLM behind it; results are then verified.")
@click.option("--model", help="With --url: the base model. [default: the first that is offered]")
@click.option("--api-key", envvar="TINKER_API_KEY", default=ANY_KEY, help="With --url: the key. [TINKER_API_KEY]")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here too.")
@click.option(
    "--html", "html_path", type=click.Path(dir_okay=False, path_type=Path), help="Write it as a page with plots here."
)
@_scenario_options
def bench(
    preset: str | None,
    url: str | None,
    admin: str | None,
    simulator: str | None,
    model: str | None,
    api_key: str,
    json_path: Path | None,
    html_path: Path | None,
    concurrency: tuple[list[int], ...],
    **values: Any,
) -> int:
    """Load a gateway as tinker SDK processes would, check every result, and report.

    The client keeps the SDK's habits: 400 submissions at once, polls of up to 45 s, its retries and its 410 rule, two
    idle connections per 50 requests in flight.

    \b
    Presets:  burst    2,048 small samples at once
              queue    32,768 small, 2,048 running at once for 5 s each
              rollout  131,072 small, the same queueing, session polls
              long     results of 32,768 tokens
              prompts  prompts of 32,768 tokens
    Small is a prompt of 128 tokens and a result of 64.

    Exit code 0 when every sample came back right, 1 when anything was lost, wrong or executed more often than the
    retry policy allows, 3 when something did not start.
    """
    console = Console()
    scenarios = _scenarios(preset, values, [count for counts in concurrency for count in counts])
    sdk_python.check(scenarios[0])
    _check_can_write({"--json": json_path, "--html": html_path})
    if scenarios[0].chaos and url is not None:
        raise ConfigError("--chaos: only what bench has started itself is broken; leave out --url")
    if url is None and (simulator or admin):
        raise ConfigError("--simulator, --admin: bench has started its own here; they go with --url")
    deployment = None if url is None else _deployment(url, admin, simulator)
    runs: list[Run] = []
    code = 0
    try:
        for scenario in scenarios:
            runs.append(run_to_end(_work(scenario, deployment, console, model, api_key)))
            print_report(runs[-1].report, console)
    except StartError as error:
        print_start_error(error)
        code = 3
    # What was measured before a later run did not start is told all the same.
    _write(runs, json_path, html_path)
    return code or runs_exit_code([run.report for run in runs])


def _check_can_write(paths: dict[str, Path | None]) -> None:
    """Raises `ConfigError`: after a long run is too late to find out."""
    for flag, path in paths.items():
        target = path if path is None or path.exists() else path.absolute().parent
        if target is not None and not os.access(target, os.W_OK):
            raise ConfigError(f"{flag} {path}: cannot be written there; name a file in a directory that can be")


def _write(runs: list[Run], json_path: Path | None, html_path: Path | None) -> None:
    if json_path is not None and runs:
        json_path.write_bytes(runs_to_json([run.report for run in runs]))
    if html_path is not None and runs:
        html_path.write_text(page(runs), encoding="utf-8")


def _scenarios(preset: str | None, values: dict[str, Any], concurrencies: list[int]) -> list[Scenario]:
    given = {name: value for name, value in values.items() if value is not None}
    given.setdefault("seed", random.SystemRandom().randrange(2**31))
    return resolve_all(preset, given, concurrencies)


def _deployment(url: str, admin: str | None, simulator: str | None) -> Deployment:
    try:
        parse_address(url)
    except ValueError as error:
        raise ConfigError(f"--url {error}") from None
    return Deployment(url.rstrip("/"), _trimmed(admin), _trimmed(simulator))


def _work(
    scenario: Scenario, deployment: Deployment | None, console: Console, model: str | None, api_key: str
) -> Coroutine[None, None, Run]:
    if deployment is None:
        return self_contained(scenario, console)
    return against(scenario, deployment, console, model, api_key)


def _trimmed(url: str | None) -> str | None:
    return None if url is None else url.rstrip("/")
