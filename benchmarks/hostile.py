"""Print the longest turn of a worker's event loop and the memory that each class of hostile body takes.

    python -m benchmarks.hostile [NAME ...]

Each class of `tests/hostile/bodies.py` is sent to one worker in a process of its own, with the in-memory store. The
longest turn and the total are CPU time; the memory is the most that Python held beside the body, in a second run.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
import tracemalloc
from typing import Final

import uvloop

from benchmarks.longest_turn import longest_turn_s
from tests.app_bench import AppBench
from tests.hostile.bodies import HOSTILE

_MIB: Final = 2**20


async def measure(name: str) -> tuple[float, float, int, int, int]:
    """Return the longest turn and the total in CPU seconds, the bytes held and those of the body, and the status."""
    hostile = HOSTILE[name]
    body = hostile.make(hostile.size_bytes)
    bench = await AppBench().open()
    # A worker's collector runs rarely, and would decide the figure.
    gc.disable()
    statuses: list[int] = []

    async def ask() -> None:
        statuses.append((await bench.request("POST", hostile.path, body)).status)

    started_s = time.thread_time()
    longest_s = await longest_turn_s(ask, lambda: bool(statuses))
    total_s = time.thread_time() - started_s
    tracemalloc.start()
    await ask()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    await bench.close()
    return longest_s, total_s, peak_bytes, len(body), statuses[0]


def row(name: str) -> str:
    longest_s, total_s, peak_bytes, body_bytes, status = uvloop.run(measure(name))
    figures = (longest_s * 1000, total_s * 1000, peak_bytes / _MIB, body_bytes / _MIB)
    return "".join(f"{figure:9.1f}" for figure in figures) + f"  {status}  {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description="The longest turn and the memory of each class of hostile body.")
    parser.add_argument("name", nargs="*", choices=[*HOSTILE, []])
    names = parser.parse_args().name or list(HOSTILE)
    sys.stdout.write("  turn ms total ms      MiB body MiB  reply\n")
    for name in names:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            sys.stdout.write(process.apply(row, (name,)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
