"""One simulator in several processes: the kernel spreads connections over their SO_REUSEPORT sockets.

The parent binds the sockets, starts one process for each, and waits; it serves nothing itself. Each process has a
control socket in a private directory, on which the others pass control requests on to it (siblings.py).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop

from gateway.machine.collector import calm_collector
from gateway.simulator.listener import bind, url_of
from gateway.simulator.siblings import Siblings
from gateway.simulator.simulator import Simulator

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from gateway.simulator.config import SimulatorConfig

# Each process starts in less than a second on an idle machine.
_START_S: Final = 60.0
_STOP_S: Final = 5.0


class ProcessEnded(Exception):
    """A process of the simulator ended unexpectedly."""


def shares(config: SimulatorConfig, processes: int) -> list[SimulatorConfig]:
    """Return the configuration of each process; `max_num_seqs` is divided. Raises `ValueError` if it is too small."""
    whole, rest = divmod(config.max_num_seqs, processes)
    if config.max_num_seqs and not whole:
        raise ValueError(f"--max-num-seqs {config.max_num_seqs} is less than --processes {processes}")
    return [replace(config, max_num_seqs=whole + (index < rest)) for index in range(processes)]


def run_processes(config: SimulatorConfig, processes: int, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; call `ready` with the URL once all processes listen.

    Raises `OSError` if the address cannot be bound, `ValueError` as `shares`, and `ProcessEnded`.
    """
    configs = shares(config, processes)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="simulator-")))
        listeners = [stack.enter_context(bind(config.host, config.port, reuse_port=True))]
        port = listeners[0].getsockname()[1]
        others = range(processes - 1)
        listeners += [stack.enter_context(bind(config.host, port, reuse_port=True)) for _ in others]
        url = url_of(listeners[0])
        children = list(_start_all(configs, listeners, directory, stack))
        for listener in listeners:
            # Otherwise the port would stay open after its process has closed it.
            listener.close()
        ready(url)
        for child in uvloop.run(_until_stopped(children)):
            # The sentinel closes shortly before the exit code is known. Exit code 0 is no failure: a signal to the
            # whole process group may stop a child first.
            child.join(_STOP_S)
            if child.exitcode != 0:
                raise ProcessEnded("a process of the simulator ended unexpectedly")


def _start_all(
    configs: list[SimulatorConfig], listeners: list[socket.socket], directory: Path, stack: ExitStack
) -> Iterator[BaseProcess]:
    context = multiprocessing.get_context("spawn")
    paths = [directory / f"{index}.sock" for index in range(len(configs))]
    started = []
    for index, (config, listener) in enumerate(zip(configs, listeners, strict=True)):
        readiness, report_ready = context.Pipe(duplex=False)
        siblings = [path for path in paths if path != paths[index]]
        arguments = (config, listener, paths[index], siblings, report_ready)
        child = context.Process(target=_child, args=arguments, daemon=True)
        child.start()
        stack.callback(_end, child)
        report_ready.close()
        started.append((child, readiness))
    for child, readiness in started:
        with readiness, suppress(EOFError):
            if readiness.poll(_START_S) and readiness.recv():
                yield child
                continue
        raise ProcessEnded("a process of the simulator did not start")


def _end(child: BaseProcess) -> None:
    child.terminate()
    child.join(_STOP_S)
    child.kill()
    child.join()


async def _until_stopped(children: list[BaseProcess]) -> list[BaseProcess]:
    """Wait for a signal or the end of a child, and return the children that ended."""
    stopped = _stopping()
    ended: list[BaseProcess] = []

    def end(child: BaseProcess) -> None:
        loop.remove_reader(child.sentinel)
        ended.append(child)
        stopped.set()

    loop = asyncio.get_running_loop()
    for child in children:
        loop.add_reader(child.sentinel, end, child)
    await stopped.wait()
    for child in children:
        loop.remove_reader(child.sentinel)
    return ended


def _child(
    config: SimulatorConfig, listener: socket.socket, control: Path, others: list[Path], report_ready: Connection
) -> None:
    calm_collector()
    try:
        uvloop.run(_serve(Simulator(config, listener, Siblings(others)), control, report_ready))
    finally:
        # The parent removes the directory; the last process does so if the parent was killed.
        control.unlink(missing_ok=True)
        with suppress(OSError):
            control.parent.rmdir()


async def _serve(simulator: Simulator, control: Path, report_ready: Connection) -> None:
    stopped = _stopping()
    parent = multiprocessing.parent_process()
    assert parent is not None
    # If the parent is killed, nobody else stops its children.
    asyncio.get_running_loop().add_reader(parent.sentinel, stopped.set)
    await simulator.start(control)
    try:
        report_ready.send(True)
        report_ready.close()
        await stopped.wait()
    finally:
        await simulator.stop()


def _stopping() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped
