"""What the steps of a small sample cost a worker: our own parts beside the well-known libraries throughout.

    python -m benchmarks.libraries [--rounds 7]

The libraries are uvicorn and Starlette as they come, redis-py, aiohttp's client, and orjson with lists. Each step is
measured in turns with ours (see run.py, which has the same figures and more), 64 in flight, with prompts of 128 tokens
and results of 64. The table shows the least CPU time of this process per sample. A heartbeat stands for the submission,
since the baseline's server has no such route. Admission, dispatching and everything else that has no library would cost
both sides the same, and is not in the table.
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvloop

from benchmarks.micro import forward, serving, store, wire
from benchmarks.run import GC_THRESHOLDS, MICRO_ROUNDS
from benchmarks.tables import markdown, shown_us
from benchmarks.turns import Plan, WrongResult, measure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.turns import Figure

IN_FLIGHT, QUICK_IN_FLIGHT = 64, 16
PROMPT_TOKENS, RESULT_TOKENS = 128, 64
CALLS = 2_000


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a sample: the start of its case's name, and the contender that stands for the library."""

    name: str
    case: str
    library: str


_STARLETTE = "uvicorn and Starlette as they come"
STEPS = (
    Step("serve the submission", "serve a small request", _STARLETTE),
    Step("read it and write the upstream's request", "request of", "orjson, lists"),
    Step("exchange with the upstream", "forward", "aiohttp"),
    Step("read the reply", "decode", "orjson, lists"),
    Step("keep the sample in Redis", "store sample", "redis-py, pipelined once a turn"),
    Step("serve the poll", "serve a poll", _STARLETTE),
    Step("write the result", "encode", "orjson, lists"),
)
# What most programs do instead of a pipeline per turn.
AWAITED = Step("keep the sample in Redis", "store sample", "redis-py, a call per command")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=MICRO_ROUNDS)
    parser.add_argument(
        "--quick", action="store_true", help="only check that everything works; the figures say nothing"
    )
    options = parser.parse_args(arguments)
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        figures = uvloop.run(measured(Plan(options.rounds, options.quick)))
    except WrongResult as error:
        sys.stdout.write(f"WRONG: {error}\n")
        return 1
    sys.stdout.write(steps_table(figures) + "\n")
    return 0


async def measured(plan: Plan) -> list[Figure]:
    calls = plan.calls(CALLS)
    figures: list[Figure] = []
    for case in (
        wire.request_case(PROMPT_TOKENS, calls),
        wire.decode_case(RESULT_TOKENS, calls),
        wire.encode_case(RESULT_TOKENS, calls),
    ):
        figures += await measure(case, plan.rounds)
    figures += (await store.over_unix_socket(plan)).figures
    figures += (await forward.forward(plan, (QUICK_IN_FLIGHT if plan.quick else IN_FLIGHT,))).figures
    figures += (await serving.serving(plan)).figures
    return figures


def steps_table(figures: Sequence[Figure]) -> str:
    """Return the table of steps, with the total, and the total if redis-py awaits each command."""
    rows: list[tuple[str, str, str, str, str]] = []
    total_us = total_theirs_us = 0.0
    for step in STEPS:
        ours_us, theirs_us = costs_us(figures, step)
        rows.append(_row(step.name, step.library, ours_us, theirs_us))
        total_us, total_theirs_us = total_us + ours_us, total_theirs_us + theirs_us
    rows.append(_row("total", "", total_us, total_theirs_us))
    pipelined, awaited = (costs_us(figures, step)[1] for step in (STEPS[4], AWAITED))
    rows.append(_row("total", AWAITED.library, total_us, total_theirs_us - pipelined + awaited))
    return markdown(("step", "library", "ours", "with the library", "difference"), rows)


def costs_us(figures: Sequence[Figure], step: Step) -> tuple[float, float]:
    """Return our cost and the library's. Raises `WrongResult` if the library was not measured."""
    found = [figure for figure in figures if figure.case.startswith(step.case)]
    theirs = [figure.least_us for figure in found if figure.contender == step.library]
    if not theirs:
        raise WrongResult(f"{step.library} was not measured; the extra `bench` installs the libraries")
    return found[0].least_us, theirs[0]


def _row(step: str, library: str, ours_us: float, theirs_us: float) -> tuple[str, str, str, str, str]:
    return (step, library, shown_us(ours_us), shown_us(theirs_us), shown_us(theirs_us - ours_us))


if __name__ == "__main__":
    sys.exit(main())
