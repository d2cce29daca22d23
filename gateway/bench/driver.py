"""Drive one bench run: start the client processes together, watch the gateway beside them, and build the report."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from gateway.bench.load import messages
from gateway.bench.load.messages import ClientReady, ClientReport, Go, Plan, Progress, Trouble
from gateway.bench.load.transport import parse_address
from gateway.bench.load.workload import Workload
from gateway.bench.report.outcome import RunFacts, build_run
from gateway.bench.scenario import shares
from gateway.bench.watch.breaking import Breaker
from gateway.bench.watch.chaos import make_plan
from gateway.bench.watch.watch import Watch
from shared.core.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from gateway.bench.installation import Deployment
    from gateway.bench.report.outcome import Run
    from gateway.bench.scenario import Scenario

    Show = Callable[[Progress], None]

# All of 127.0.0.0/8 is local; one source address per client process keeps their ports apart.
_SOURCE_BASE: Final = ipaddress.IPv4Address("127.0.1.1")
_STOP_S: Final = 5.0
# In a healthy gateway two polls of 45 s and a back-off of 30 s may pass without one sample ending.
_STUCK_S: Final = 180.0

T = TypeVar("T")


async def drive(
    scenario: Scenario, deployment: Deployment, model: str, api_key: str, *, verify: bool, show: Show
) -> Run:
    """Run `scenario` against `deployment`; `show` gets the total progress of all clients.

    Raises `StartError` if a client process cannot start or gets no session.
    """
    board = _Board(scenario.client_processes, show)
    plans = make_plans(scenario, deployment.url, model, api_key, verify=verify)
    clients = [ClientProcess(number, board, client_command(scenario)) for number in range(len(plans))]
    watch = Watch(deployment, lambda: [pid for client in clients if (pid := client.running_pid) is not None])
    breaker = _breaker(scenario, deployment, watch)
    try:
        ready = await _all([client.start(plan) for client, plan in zip(clients, plans, strict=True)])
        await watch.start()
        started_s = time.monotonic()
        reports = await _load(clients, breaker)
        seconds = time.monotonic() - started_s
    finally:
        # A cancelled run stops its children before it goes on unwinding.
        await asyncio.shield(_stop(clients, watch))
    breaks = tuple(breaker.breaks) if breaker is not None else ()
    facts = RunFacts(
        scenario,
        reports,
        seconds,
        ready[0].session_poll,
        verify,
        model,
        deployment.kept_in,
        started_s=started_s,
        breaks=breaks,
        sdk_version=ready[0].sdk_version,
    )
    return build_run(facts, watch.observations)


def make_plans(scenario: Scenario, url: str, model: str, api_key: str, *, verify: bool) -> list[Plan]:
    workload = Workload(
        seed=scenario.seed,
        model=model,
        prompt_tokens=scenario.prompt_tokens,
        max_tokens=scenario.max_tokens,
        num_samples=scenario.num_samples,
        abandon_polls=scenario.abandon_polls,
        cancel=scenario.cancel,
        duplicates=scenario.duplicates,
        trouble_within_s=max(scenario.gen_seconds, 0.1),
    )
    concurrencies = shares(scenario.concurrency, scenario.client_processes)
    return [
        Plan(
            url=url,
            source_ip=source_ip(url, number),
            api_key=api_key,
            workload=workload,
            session_poll=scenario.session_poll,
            verify=verify,
            first=number,
            step=scenario.client_processes,
            samples=scenario.samples,
            concurrency=concurrency,
            heartbeat_s=scenario.heartbeat_seconds,
            stuck_after_s=_STUCK_S + 10 * scenario.gen_seconds,
        )
        for number, concurrency in enumerate(concurrencies)
    ]


def source_ip(url: str, number: int) -> str | None:
    """Return the loopback address for client process `number`, or None if the gateway is not on IPv4 loopback."""
    try:
        address = ipaddress.ip_address(parse_address(url).host)
    except ValueError:
        return None
    on_loopback = address.version == 4 and address.is_loopback
    return str(_SOURCE_BASE + number) if on_loopback else None


def client_command(scenario: Scenario) -> list[str]:
    if scenario.client == "raw":
        return [sys.executable, "-m", "gateway.bench.load.process"]
    # -P keeps the script's folder off the path: its modules have names that the SDK's imports must not find.
    return [scenario.sdk_python or sys.executable, "-P", str(Path(__file__).parent / "load" / "sdk_entry.py")]


class ClientProcess:
    """One load client process, from its plan to its report."""

    def __init__(self, number: int, board: _Board, command: Sequence[str]) -> None:
        self._command = command
        self._number = number
        self._board = board
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running_pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self, plan: Plan) -> ClientReady:
        """Return when the client has its session and waits for `Go`. Raises `StartError`."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=messages.MAX_LINE_BYTES,
            start_new_session=True,
        )
        self._send(plan)
        answer = await self._receive()
        if not isinstance(answer, ClientReady):
            raise StartError(f"client process {self._number} answered its plan with {answer!r}")
        return answer

    async def run(self) -> ClientReport:
        """Send `Go` and wait for the report. Raises `StartError` if the process ends without one."""
        self._send(Go())
        while not isinstance(answer := await self._receive(), ClientReport):
            if isinstance(answer, Progress):
                self._board.update(self._number, answer)
        return answer

    async def stop(self) -> None:
        """Close its standard input, which stops the process, and kill it if it does not exit in time."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def _send(self, message: messages.ToClient) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(messages.encode(message))

    async def _receive(self) -> messages.FromClient:
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            code = await self._process.wait()
            raise StartError(f"client process {self._number} ended with exit code {code} before its report")
        answer = messages.decode_for_driver(line)
        if isinstance(answer, Trouble):
            raise StartError(answer.message)
        return answer


class _Board:
    """The latest progress of every client process, shown as one total."""

    def __init__(self, clients: int, show: Show) -> None:
        self._latest = [Progress(0, 0, 0, 0, 0)] * clients
        self._show = show

    def update(self, number: int, progress: Progress) -> None:
        self._latest[number] = progress
        self._show(total_progress(self._latest))


def total_progress(parts: list[Progress]) -> Progress:
    return Progress(*(sum(values) for values in zip(*map(msgspec.structs.astuple, parts), strict=True)))


def _breaker(scenario: Scenario, deployment: Deployment, watch: Watch) -> Breaker | None:
    breakable = deployment.breakable
    if breakable is None:
        return None

    async def restart_upstream() -> None:
        await watch.simulator_ends()
        await breakable.upstream.restart()

    plan = make_plan(scenario.chaos, scenario.seed)
    return Breaker(plan, breakable.redis, restart_upstream, watch.status, random.Random(scenario.seed))


async def _load(clients: list[ClientProcess], breaker: Breaker | None) -> list[ClientReport]:
    """Run all clients and the chaos plan beside them, and return the clients' reports."""
    breaking = asyncio.create_task(breaker.run()) if breaker is not None else None
    try:
        reports = await _all([client.run() for client in clients])
        if breaking is not None and breaking.done():
            breaking.result()
        return reports
    finally:
        if breaking is not None:
            breaking.cancel()
            await asyncio.gather(breaking, return_exceptions=True)


async def _all(coroutines: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Gather as `asyncio.gather` does, but let the first failure cancel the others; it is raised as it is."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stop(clients: list[ClientProcess], watch: Watch) -> None:
    try:
        await watch.stop()
    finally:
        await asyncio.gather(*(client.stop() for client in clients))
