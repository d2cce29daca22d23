"""`gateway demo`: everything on one machine in a minute, with nothing to install or to name."""

from __future__ import annotations

import os
import shutil
import sys

import click
from rich.console import Console

from gateway.bench.report.report import exit_code
from gateway.bench.run import print_report, print_start_error, run_to_end, self_contained
from gateway.bench.scenario import resolve
from shared.core.errors import StartError

# Linux answers for all of 127.0.0.0/8, so the demo can show one source address per worker.
_SOURCE_IPS = "127.0.2.1-127.0.2.{workers}"
_MAX_WORKERS = 64


@click.command()
@click.option("--samples", type=click.IntRange(1), default=2_000, show_default=True, help="Samples to draw.")
@click.option("--workers", type=click.IntRange(1, _MAX_WORKERS), default=2, show_default=True, help="Worker processes.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Decides prompts and trouble.")
def demo(samples: int, workers: int, seed: int) -> int:
    """See it work: no GPU, no Redis, no arguments.

    Starts a simulated vLLM and the gateway with its embedded Redis on free ports, draws samples through the real wire
    protocol from another process as the tinker SDK would, with some submissions repeated and some polls dropped on the
    way, compares every token and logprob with what it must be, prints a report, and leaves nothing running.

    Exit code 0 when every sample came back right and was executed once, 1 when not, 3 when something did not start.
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
    # Not on the path when it was started by scripts/gateway.
    command = "gateway" if shutil.which("gateway") else os.path.relpath(sys.argv[0])
    console.print(f"Try next:  {command} --upstream http://YOUR-VLLM:8000", style="dim", highlight=False)
    console.print(f"           {command} bench --preset burst", style="dim", highlight=False)
    return exit_code(report)
