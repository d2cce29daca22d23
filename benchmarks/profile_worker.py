"""Profile one worker with py-spy during a run of `gateway bench`, and sum its CPU by component.

    python benchmarks/profile_worker.py [--concurrency 512] [--samples 20000] [--raw stacks.txt] ...

Each look at the stack counts for the innermost frame that belongs to a component: the C function of a library, or the
Python function that called one that belongs to none. Waiting is not counted, nor is the system call in which the loop
waits, since py-spy cannot distinguish the two. py-spy stops the process for each look, so the shares are those of a
slower worker. Needs the extra `bench` and the right to trace processes.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from rich.console import Console

from benchmarks.tables import markdown
from gateway.bench.installation import running_stack
from gateway.bench.run import against
from gateway.bench.scenario import resolve

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gateway.bench.installation import Deployment
    from gateway.bench.scenario import Scenario

LOOKS_PER_S = 200
# The first pattern that matches a frame wins; frames are tried from the innermost outwards.
COMPONENTS: tuple[tuple[str, str], ...] = (
    ("kernel: sockets", r"^_*(libc_)?(send|sendmsg|write|writev|recv|recvmsg|read)\b|^accept|^_*connect\b"),
    ("kernel: sockets", r"^_*(epoll_ctl|syscall|close|shutdown|socket|bind|getsockname|setsockopt|ioctl)\b"),
    ("garbage collection", r"^gc_|^_PyGC|^deduce_unreachable|^subtract_refs|^visit_|^PyGC_|^move_unreachable"),
    ("numpy", r"numpy"),
    ("JSON of requests and replies", r"simdjson|orjson|msgspec"),
    ("protobuf", r"google[/.]|upb|shared/wire/sdk/result"),
    ("translation (shared/wire)", r"shared/wire/"),
    ("upstream client", r"aiohttp|yarl|multidict|workers/upstream/"),
    ("store client", r"hiredis|shared/(redis|store)/"),
    ("HTTP server", r"httptools|uvicorn|shared/http/"),
    ("routes", r"workers/api/|starlette|shared/core/(ids|callers)"),
    ("dispatching and execution", r"workers/(samples|duties)/|shared/(core|loop)/"),
    ("event loop and tasks", r"uvloop|libuv|^uv_|asyncio|_asyncio"),
)
_COMPILED = tuple((name, re.compile(pattern)) for name, pattern in COMPONENTS)
_WAITING = re.compile(
    r"^epoll_p?wait|^PyThread_acquire_lock_timed|^lock_PyThread_acquire_lock|^pthread_cond_(timed)?wait"
)
# A wait ends in nameless frames of the C library, so look at this many innermost frames.
_INNERMOST = 4
REST = "interpreter and the rest"


def component_of(frames: Sequence[str]) -> str:
    """Return the component of a stack. `frames` are outermost first, as py-spy writes them."""
    for frame in reversed(frames):
        for name, pattern in _COMPILED:
            if pattern.search(frame):
                return name
    return REST


def shares(lines: Iterable[str]) -> Counter[str]:
    """Count the looks by component in lines of `frame;frame;... count`."""
    found: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rstrip().rpartition(" ")
        frames = stack.split(";")
        if stack and count.isdecimal() and not any(map(_WAITING.match, frames[-_INNERMOST:])):
            found[component_of(frames)] += int(count)
    return found


def shares_table(found: Mapping[str, int], cpu_ms: float | None) -> str:
    """Write the shares as a table, and split `cpu_ms` of a sample by them."""
    total = sum(found.values())
    rows = []
    for name, count in sorted(found.items(), key=lambda item: -item[1]):
        cost = f"{count / total * cpu_ms * 1e3:.0f} us" if cpu_ms is not None else ""
        rows.append((name, f"{count / total:.1%}", cost))
    return markdown(("component", "share", "per sample"), rows)


async def profiled(scenario: Scenario, path: Path) -> float | None:
    """Write the stacks of worker 0 to `path`, and return the workers' CPU per sample in ms, slowed down by py-spy."""
    async with running_stack(scenario) as deployment:
        spy = await _spy_on(await _first_worker(deployment), path)
        try:
            run = await against(scenario, deployment, Console())
        finally:
            spy.send_signal(signal.SIGINT)
            await spy.wait()
        return run.report.gateway.cpu_ms_per_sample


async def _spy_on(pid: int, path: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(py_spy(), "record", "--native", "--format", "raw", "--rate", str(LOOKS_PER_S)),
        *("--pid", str(pid), "--output", str(path), "--duration", "unlimited"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )


def py_spy() -> str:
    """Find py-spy. Raises `SystemExit` with the name of the extra to install."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise SystemExit("py-spy is not installed; the extra `bench` installs it")
    return found


async def _first_worker(deployment: Deployment) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{deployment.admin_url}/status") as response:
        pid: int = (await response.json())["workers"][0]["pid"]
        return pid


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--vllm-mode", default="instant")
    parser.add_argument("--session-poll", action="store_true")
    parser.add_argument("--raw", type=Path, help="keep the stacks here, for a flame graph")
    given = vars(parser.parse_args(arguments))
    raw = given.pop("raw")
    scenario = resolve(None, given | {"seed": 1})
    with tempfile.TemporaryDirectory() as directory:
        path = raw or Path(directory) / "stacks.txt"
        cpu_ms = asyncio.run(profiled(scenario, path))
        sys.stdout.write(shares_table(shares(path.read_text().splitlines()), cpu_ms) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
