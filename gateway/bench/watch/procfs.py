"""Read the usage of processes and of the machine from /proc: CPU, memory, file descriptors (Linux, proc(5))."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection

_PROC: Final = Path("/proc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
# Fields of /proc/PID/stat, counted from 0 after the command's closing parenthesis.
_UTIME_FIELD: Final = 11
_STIME_FIELD: Final = 12
_STATM_RESIDENT_FIELD: Final = 1
_COMM_CHARS: Final = 15


class Machine(msgspec.Struct, kw_only=True):
    cpus: int
    memory_bytes: int
    kernel: str
    python: str


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    cpu_seconds: float
    rss_bytes: int
    fds: int


def usage(pid: int) -> ProcessUsage | None:
    """Return the usage of one process, or None if it does not exist or belongs to somebody else."""
    directory = _PROC / str(pid)
    try:
        stat = (directory / "stat").read_text()
        statm = (directory / "statm").read_text()
        fds = len(os.listdir(directory / "fd"))
    except OSError:
        return None
    return ProcessUsage(cpu_seconds(stat), resident_bytes(statm), fds)


def children(pid: int) -> list[int]:
    """Return the child processes that the first thread of `pid` started."""
    try:
        return [int(child) for child in (_PROC / str(pid) / "task" / str(pid) / "children").read_text().split()]
    except OSError:
        return []


def children_named(pid: int, names: Collection[str]) -> list[int]:
    """Return the child processes of `pid` whose command is one of `names` (the kernel keeps 15 characters)."""
    wanted = {name[:_COMM_CHARS] for name in names}
    found = []
    for child in children(pid):
        with suppress(OSError):
            if (_PROC / str(child) / "comm").read_text().strip() in wanted:
                found.append(child)
    return found


def cpu_seconds(stat: str) -> float:
    """Return user + system time from /proc/PID/stat; the command in it may contain spaces and parentheses."""
    fields = stat[stat.rindex(")") + 1 :].split()
    return (int(fields[_UTIME_FIELD]) + int(fields[_STIME_FIELD])) / _TICKS_PER_S


def resident_bytes(statm: str) -> int:
    return int(statm.split()[_STATM_RESIDENT_FIELD]) * _PAGE_BYTES


def cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def machine_busy_seconds() -> float:
    """Return the CPU seconds of all cores since the machine started."""
    return busy_seconds((_PROC / "stat").read_text())


def busy_seconds(stat: str) -> float:
    """Return the busy seconds in /proc/stat: everything but idle and iowait.

    The two guest fields are left out, since user and nice already contain them.
    """
    user, nice, system, _idle, _iowait, *rest = map(int, stat.partition("\n")[0].split()[1:9])
    return (user + nice + system + sum(rest)) / _TICKS_PER_S


def listen_overflows() -> int | None:
    """Return how many connection attempts met a full accept queue since boot, or None if the kernel does not say."""
    try:
        return netstat_value((_PROC / "net" / "netstat").read_text(), "ListenOverflows")
    except OSError:
        return None


def netstat_value(netstat: str, name: str) -> int | None:
    """Return one value of /proc/net/netstat, where lines come in pairs: names, then values."""
    lines = [line.split() for line in netstat.splitlines()]
    found = (dict(zip(names, values, strict=False)) for names, values in zip(lines[::2], lines[1::2], strict=False))
    return next((int(pairs[name]) for pairs in found if name in pairs), None)


def machine() -> Machine:
    return Machine(
        cpus=cpus(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES,
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )
