"""`gateway demo`: a complete installation on one machine in a minute, with nothing to install or configure."""

from __future__ import annotations

import os
from pathlib import Path

import click
from rich.console import Console

from gateway.bench.report.report import exit_code
from gateway.bench.run import print_report, print_start_error, run_to_end, self_contained
from gateway.bench.scenario import resolve
from gateway.settings.option_values import Parsed
from gateway.settings.quantities import whole
from shared.core.errors import StartError

# All of 127.0.0.0/8 is local on Linux, so the demo can show one source address per worker.
_SOURCE_IPS = "127.0.2.1-127.0.2.{workers}"
_MAX_WORKERS = 64


@click.command()
@click.option("--samples", type=Parsed(whole(1), "N"), default=2_000, show_default=True, help="Samples to draw.")
@click.option(
    "--workers", type=Parsed(whole(1, _MAX_WORKERS), "N"), default=2, show_default=True, help="Worker processes."
)
@click.option("--seed", type=Parsed(whole(0), "N"), default=0, show_default=True, help="Seed of prompts and faults.")
def demo(samples: int, workers: int, seed: int) -> int:
    """See it work: no GPU, no Redis, no arguments.

    Start a simulated vLLM and the gateway with its embedded Redis on free ports. Then draw samples over the real wire
    protocol from another process, as the tinker SDK does, repeating some submissions and dropping some polls. Compare
    every token and logprob with the expected one, print a report, and leave nothing running.

    Exit code 0 if every sample came back right and was executed once, 1 if not, 3 if something did not start.
    """
    console = Console()
    scenario = resolve(
        None,
        {
            "samples": samples,
            "workers": workers,
            "seed": seed,
            "source_ips": _SOURCE_IPS.format(workers=workers),
            "abandon_polls": 0.02,
            "duplicates": 0.02,
        },
    )
    try:
        report = run_to_end(self_contained(scenario, console)).report
    except StartError as error:
        print_start_error(error)
        return 3
    print_report(report, console)
    # In a checkout the command is not on the path, and the documents name the script.
    script = Path(__file__).parents[2] / "scripts" / "gateway"
    command = os.path.relpath(script) if script.exists() else "gateway"
    console.print(f"Try next:  {command} --upstream http://YOUR-VLLM:8000", style="dim", highlight=False)
    console.print(f"           {command} bench --preset burst", style="dim", highlight=False)
    return exit_code(report)
