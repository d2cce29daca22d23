"""`gateway simulate-vllm`: the command line of the simulated vLLM."""

from __future__ import annotations

import asyncio
import signal

import click
import uvloop

from gateway.machine.collector import calm_collector
from gateway.settings import quantities
from gateway.settings.option_values import Parsed
from gateway.simulator.config import SimulatorConfig
from gateway.simulator.processes import ProcessEnded, run_processes
from gateway.simulator.simulator import Simulator
from shared.core.errors import StartError

_SECONDS = Parsed(quantities.duration_s(0), "SECONDS")


def _number(at_least: int) -> Parsed:
    return Parsed(quantities.whole(at_least), "N")


def _choice(*words: str) -> Parsed:
    return Parsed(quantities.choice(*words), "|".join(words))


@click.command("simulate-vllm")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=Parsed(quantities.whole(0, 65_535), "PORT"),
    default=8100,
    show_default=True,
    help="Port; 0 chooses a free one and prints it.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    default=("sim/tiny",),
    show_default=True,
    help="Model to serve; repeatable.",
)
@click.option("--max-model-len", type=_number(2), default=131_072, show_default=True, help="Context length in tokens.")
@click.option(
    "--mode",
    type=_choice("instant", "latency", "barrier"),
    default="instant",
    show_default=True,
    help="instant: answer at once. latency: after --gen-seconds. barrier: hold all requests and answer them together.",
)
@click.option(
    "--gen-seconds",
    type=_SECONDS,
    default=1.0,
    show_default=True,
    help="Duration of one generation in latency mode.",
)
@click.option(
    "--max-num-seqs",
    type=_number(0),
    default=0,
    show_default=True,
    help="Generations at once in latency mode; 0: no limit.",
)
@click.option(
    "--barrier-size",
    type=_number(0),
    default=0,
    show_default=True,
    help="Requests that barrier mode answers together; 0: all, once no new one arrives.",
)
@click.option(
    "--logprobs-mode",
    type=_choice("processed_logprobs", "raw_logprobs"),
    default="processed_logprobs",
    show_default=True,
    help="Whether logprobs use the temperature (processed) or ignore it (raw, which is vLLM's own default).",
)
@click.option(
    "--lora",
    type=_choice("any", "files", "off"),
    default="any",
    show_default=True,
    help="Load adapters from any path, only from directories with an adapter_config.json (files), or not at all (off).",
)
@click.option(
    "--scale-out/--no-scale-out",
    default=True,
    show_default=True,
    help="Serve /inference/v1/generate, as vLLM does with --enable-scale-out.",
)
@click.option(
    "--keep-alive",
    type=_SECONDS,
    default=5.0,
    show_default=True,
    help="Idle connections are closed after this time.",
)
@click.option(
    "--processes",
    type=_number(1),
    default=1,
    show_default=True,
    help="Processes on the same port; each answers /_sim/stats for all.",
)
def simulate_vllm(
    host: str,
    port: int,
    models: tuple[str, ...],
    max_model_len: int,
    mode: str,
    gen_seconds: float,
    max_num_seqs: int,
    barrier_size: int,
    logprobs_mode: str,
    lora: str,
    scale_out: bool,
    keep_alive: float,
    processes: int,
) -> None:
    """Run a simulated vLLM: real requests and replies, but no model.

    Tokens and logprobs are a pure function of model, prompt, seed and choice (gateway/simulator/tokens.py), so any
    client can check that a result is its own. The vocabulary has 32,000 tokens; a prompt with a higher token is
    refused, as vLLM does. A client that disconnects aborts its generation.

    \b
    POST /_sim/faults    set faults: [{"kind": "status", "status": 503, "next": 3}]
                         (all kinds: gateway/simulator/faults.py)
    DELETE /_sim/faults  remove all faults
    POST /_sim/release   release what a barrier or a `hold` fault holds
    GET /_sim/stats      counts of requests received, executed, aborted
    POST /_sim/reset     remove all faults and count from zero
    """
    config = SimulatorConfig(
        host=host,
        port=port,
        models=models,
        max_model_len=max_model_len,
        mode=mode,  # type: ignore[arg-type] # click has checked it
        gen_seconds=gen_seconds,
        max_num_seqs=max_num_seqs,
        barrier_size=barrier_size,
        lora=lora,  # type: ignore[arg-type] # click has checked it
        scale_out=scale_out,
        raw_logprobs=logprobs_mode == "raw_logprobs",
        keep_alive_s=keep_alive,
    )
    try:
        run(config, processes)
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    except (ValueError, ProcessEnded) as error:
        raise click.ClickException(str(error)) from None


def run(config: SimulatorConfig, processes: int = 1) -> None:
    """Serve until SIGTERM or SIGINT; print a line once it listens. Raises as `run_processes`."""
    if processes == 1:
        uvloop.run(_serve(config))
        return
    run_processes(config, processes, lambda url: click.echo(_ready_line(config, url, f", {processes} processes")))


def _ready_line(config: SimulatorConfig, url: str, more: str = "") -> str:
    return f"simulated vLLM on {url} ({', '.join(config.models)}, {config.mode}{more})"


async def _serve(config: SimulatorConfig) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    calm_collector()
    async with Simulator(config) as simulator:
        click.echo(_ready_line(config, simulator.url))
        await stopped.wait()
