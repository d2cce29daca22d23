"""`gateway bench`: load a gateway from the command line."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console

from gateway.bench.installation import Deployment
from gateway.bench.load.transport import parse_address
from gateway.bench.report.page import page
from gateway.bench.report.report import exit_code, to_json
from gateway.bench.run import ANY_KEY, against, print_report, print_start_error, run_to_end, self_contained
from gateway.bench.scenario import PRESETS, check_sdk_python, resolve_all
from gateway.settings import quantities
from gateway.settings.option_values import Parsed
from shared.core.errors import ConfigError, StartError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.bench.report.outcome import Run


_count = quantities.whole(1)
_COUNT: Final = Parsed(_count, "N")
_FRACTION: Final = Parsed(quantities.fraction, "FRACTION")


def _counts(text: str) -> list[int]:
    try:
        return [_count(part.strip()) for part in text.split(",")]
    except ValueError:
        raise ValueError("give a whole number of at least 1, or several separated by commas") from None


# The flags that make the scenario. A flag that is not given keeps the preset's value or the default.
_SCENARIO_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--samples", type=_COUNT, help="Total number of samples. [default: 2048]"),
    click.option(
        "--concurrency",
        type=Parsed(_counts, "N[,N...]"),
        multiple=True,
        help="Samples in flight at once. Several values make several runs, each with ten times as many samples unless "
        "--samples is given. [default: all, up to 2048]",
    ),
    click.option("--prompt-tokens", type=_COUNT, help="Length of each prompt. [default: 64]"),
    click.option("--max-tokens", type=_COUNT, help="Length of each result. [default: 32]"),
    click.option("--num-samples", type=_COUNT, help="Sequences per sample. [default: 1]"),
    click.option(
        "--client",
        type=Parsed(quantities.choice("raw", "sdk"), "raw|sdk"),
        help="Load client: raw, which behaves like the SDK at a fraction of its cost, or the published SDK. "
        "[default: raw]",
    ),
    click.option(
        "--sdk-python",
        metavar="PATH",
        help="With --client sdk: the Python of an environment with the package tinker. [default: this one]",
    ),
    click.option("--client-processes", type=_COUNT, help="Load client processes. [default: 1]"),
    click.option(
        "--session-poll/--no-session-poll",
        default=None,
        help="Poll once per session or once per sample. [default: what the gateway offers]",
    ),
    click.option(
        "--vllm-mode",
        type=Parsed(quantities.choice("instant", "latency", "barrier"), "instant|latency|barrier"),
        help="How the simulated vLLM spends its time. [default: latency]",
    ),
    click.option(
        "--gen-seconds",
        type=Parsed(quantities.duration_s(0), "SECONDS"),
        help="Duration of a simulated generation. [default: 1]",
    ),
    click.option(
        "--max-num-seqs", type=_COUNT, help="Generations that the simulated vLLM runs at once. [default: no limit]"
    ),
    click.option("--simulator-processes", type=_COUNT, help="Processes of the simulated vLLM. [default: 1]"),
    click.option("--workers", type=_COUNT, help="Worker processes of the gateway. [default: 2]"),
    click.option("--source-ips", metavar="LIST", help="Source addresses of the workers, as for `gateway serve`."),
    click.option("--abandon-polls", type=_FRACTION, help="Fraction of polls that the client drops. [default: 0]"),
    click.option("--cancel", type=_FRACTION, help="Fraction of samples that the client cancels. [default: 0]"),
    click.option(
        "--duplicates",
        type=_FRACTION,
        help="Fraction of samples submitted twice: on two connections at once, or after a lost reply. [default: 0]",
    ),
    click.option(
        "--heartbeat-seconds",
        type=Parsed(quantities.duration_s(), "SECONDS"),
        help="Interval of a client process's heartbeats. [default: 10]",
    ),
    click.option(
        "--verify/--no-verify",
        default=None,
        help="Compare every token with the simulated vLLM's. [default: only if the simulated vLLM is known]",
    ),
    click.option(
        "--chaos",
        metavar="PLAN",
        help="What to break, and how many seconds after the first sample: kill-worker@5,restart-redis@10,"
        "wipe-redis@12,stall-redis@14,kill-upstream@16. random or random@SECONDS draws a plan from --seed. "
        "Not with --url.",
    ),
    click.option(
        "--seed", type=Parsed(quantities.whole(0), "N"), help="Seed of prompts and faults. [default: drawn and printed]"
    ),
]


def _scenario_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_SCENARIO_OPTIONS):
        function = option(function)
    return function


@click.command()
@click.option(
    "--preset",
    type=Parsed(quantities.choice(*PRESETS), "NAME"),
    help="One of the presets above; other flags change parts of it.",
)
@click.option(
    "--url",
    metavar="URL",
    help="A running gateway, http:// only (no TLS). Without it, bench starts a gateway and a simulated vLLM.",
)
@click.option("--admin", metavar="URL", help="With --url: its admin address, for CPU, memory and Redis figures.")
@click.option("--simulator", metavar="URL", help="With --url: the simulated vLLM behind it, to verify results.")
@click.option("--model", metavar="NAME", help="With --url: the base model. [default: the first one offered]")
@click.option(
    "--api-key", metavar="KEY", envvar="TINKER_API_KEY", default=ANY_KEY, help="With --url: the key. [TINKER_API_KEY]"
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="Also write the report as JSON.",
)
@click.option(
    "--html",
    "html_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="Also write the report as a page with plots.",
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

    The client behaves as the SDK does: 400 submissions at once, polls of up to 45 s, the same retries and the same
    reaction to a 410, two idle connections per 50 requests in flight.

    \b
    Presets:  burst    2,048 small samples at once
              queue    32,768 small, 2,048 running at once for 5 s each
              rollout  131,072 small, queued in the same way, session polls
              long     results of 32,768 tokens
              prompts  prompts of 32,768 tokens
    A small sample has a prompt of 128 tokens and a result of 64.

    Exit code 0 if every sample came back right, 1 if anything was lost, wrong or executed more often than the retry
    policy allows, 3 if something did not start.
    """
    console = Console()
    given = {name: value for name, value in values.items() if value is not None}
    given.setdefault("seed", random.SystemRandom().randrange(2**31))
    scenarios = resolve_all(preset, given, [count for counts in concurrency for count in counts])
    check_sdk_python(scenarios[0])
    _check_can_write({"--json": json_path, "--html": html_path})
    if scenarios[0].chaos and url is not None:
        raise ConfigError(
            "--chaos has no meaning with --url: bench breaks only what it has started itself; give one of the two"
        )
    if url is None and (simulator or admin):
        raise ConfigError(
            "--simulator and --admin have no meaning without --url: bench then starts its own; leave them out"
        )
    deployment = None if url is None else _deployment(url, admin, simulator)
    runs: list[Run] = []
    code = 0
    try:
        for scenario in scenarios:
            if deployment is None:
                runs.append(run_to_end(self_contained(scenario, console)))
            else:
                runs.append(run_to_end(against(scenario, deployment, console, model, api_key)))
            print_report(runs[-1].report, console)
    except StartError as error:
        print_start_error(error)
        code = 3
    # If a later run did not start, the runs before it are still written.
    _write(runs, json_path, html_path)
    return code or exit_code(*(run.report for run in runs))


def _check_can_write(paths: dict[str, Path | None]) -> None:
    """Raise `ConfigError` if a report cannot be written: after a long run it would be too late."""
    for flag, path in paths.items():
        target = path if path is None or path.exists() else path.absolute().parent
        if target is not None and not os.access(target, os.W_OK):
            raise ConfigError(f"{flag}: {str(path)!r} cannot be written; name a file in a writable directory")


def _write(runs: list[Run], json_path: Path | None, html_path: Path | None) -> None:
    if json_path is not None and runs:
        json_path.write_bytes(to_json(*(run.report for run in runs)))
    if html_path is not None and runs:
        html_path.write_text(page(runs), encoding="utf-8")


def _deployment(url: str, admin: str | None, simulator: str | None) -> Deployment:
    try:
        parse_address(url)
    except ValueError as error:
        raise ConfigError(f"--url: {error}") from None
    return Deployment(url.rstrip("/"), admin and admin.rstrip("/"), simulator and simulator.rstrip("/"))
