"""One simulator in several processes: the kernel spreads connections over their SO_REUSEPORT sockets.

The parent binds the sockets, starts a process for each, and waits; it answers nothing itself. Each process has a
control socket in a private directory, on which it does what a client told another one (siblings.py).
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

# Importing numpy and binding takes under a second each, on a machine that may be busy.
_START_S: Final = 60.0
_STOP_S: Final = 5.0


class ProcessEnded(Exception):
    """A process of the simulator ended by itself."""


def shares(config: SimulatorConfig, processes: int) -> list[SimulatorConfig]:
    """What each process is told: `max_num_seqs` is divided among them. Raises `ValueError` when it cannot be."""
    whole, rest = divmod(config.max_num_seqs, processes)
    if config.max_num_seqs and not whole:
        raise ValueError(f"--max-num-seqs {config.max_num_seqs} is less than --processes {processes}")
    return [replace(config, max_num_seqs=whole + (index < rest)) for index in range(processes)]


def run_processes(config: SimulatorConfig, processes: int, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `ready` gets the URL once all processes listen.

    Raises `OSError` when the address cannot be had, `ValueError` as `shares`, `ProcessEnded`.
    """
    configs = shares(config, processes)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="simulator-")))
        listeners = _bind_all(config, processes, stack)
        url = url_of(listeners[0])
        children = list(_start_all(configs, listeners, directory, stack))
        for listener in listeners:
            # A copy that stays open here would keep the port listening after its process has closed it.
            listener.close()
        ready(url)
        _check(uvloop.run(_until_stopped(children)))


def _bind_all(config: SimulatorConfig, processes: int, stack: ExitStack) -> list[socket.socket]:
    first = stack.enter_context(bind(config.host, config.port, reuse_port=True))
    port = first.getsockname()[1]
    others = range(processes - 1)
    return [first, *(stack.enter_context(bind(config.host, port, reuse_port=True)) for _ in others)]


def _start_all(
    configs: list[SimulatorConfig], listeners: list[socket.socket], directory: Path, stack: ExitStack
) -> Iterator[BaseProcess]:
    context = multiprocessing.get_context("spawn")
    paths = [directory / f"{index}.sock" for index in range(len(configs))]
    started = []
    for index, (config, listener) in enumerate(zip(configs, listeners, strict=True)):
        heard, told = context.Pipe(duplex=False)
        siblings = [path for path in paths if path != paths[index]]
        child = context.Process(target=_child, args=(config, listener, paths[index], siblings, told), daemon=True)
        child.start()
        stack.callback(_end, child)
        told.close()
        started.append((child, heard))
    for child, heard in started:
        _await_ready(heard)
        yield child


def _await_ready(heard: Connection) -> None:
    with heard:
        try:
            if heard.poll(_START_S) and heard.recv():
                return
        except EOFError:
            pass
    raise ProcessEnded("a process of the simulator did not start")


def _end(child: BaseProcess) -> None:
    child.terminate()
    child.join(_STOP_S)
    child.kill()
    child.join()


async def _until_stopped(children: list[BaseProcess]) -> list[BaseProcess]:
    """Until a signal, or until one of the children ends; those that ended."""
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


def _check(ended: list[BaseProcess]) -> None:
    """A signal for the whole process group may end a child first, as asked: that is no failure."""
    for child in ended:
        # Its sentinel closes a moment before the kernel tells how it ended.
        child.join(_STOP_S)
        if child.exitcode != 0:
            raise ProcessEnded("a process of the simulator ended by itself")


def _child(
    config: SimulatorConfig, listener: socket.socket, control: Path, others: list[Path], told: Connection
) -> None:
    calm_collector()
    uvloop.run(_serve(Simulator(config, listener, Siblings(others)), control, told))


async def _serve(simulator: Simulator, control: Path, told: Connection) -> None:
    stopped = _stopping()
    parent = multiprocessing.parent_process()
    assert parent is not None
    # Nobody is left to stop a child whose parent was killed.
    asyncio.get_running_loop().add_reader(parent.sentinel, stopped.set)
    await simulator.start(control)
    try:
        told.send(True)
        told.close()
        await stopped.wait()
    finally:
        await simulator.stop()
        _clear(control)


def _clear(control: Path) -> None:
    """The last process to go takes the directory along, in case that the parent, whose task it is, was killed."""
    control.unlink(missing_ok=True)
    with suppress(OSError):
        control.parent.rmdir()


def _stopping() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped
