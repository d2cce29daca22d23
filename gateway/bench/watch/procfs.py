"""What the operating system says of a process: CPU, memory, file descriptors; and of the machine."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection

_PROC: Final = Path("/proc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
# Fields of /proc/PID/stat behind the command's closing parenthesis (proc(5) counts from 1, before it).
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
    """None when there is no such process, or it is not ours to look at."""
    directory = _PROC / str(pid)
    try:
        stat = (directory / "stat").read_text()
        statm = (directory / "statm").read_text()
        fds = len(os.listdir(directory / "fd"))
    except OSError:
        return None
    return ProcessUsage(cpu_seconds(stat), resident_bytes(statm), fds)


def children(pid: int) -> list[int]:
    """Those that the first thread of `pid` started."""
    try:
        return [int(child) for child in (_PROC / str(pid) / "task" / str(pid) / "children").read_text().split()]
    except OSError:
        return []


def children_named(pid: int, names: Collection[str]) -> list[int]:
    """The child processes of `pid` whose command has one of `names` (15 characters are kept of it)."""
    wanted = {name[:_COMM_CHARS] for name in names}
    return [child for child in children(pid) if _command(child) in wanted]


def _command(pid: int) -> str | None:
    try:
        return (_PROC / str(pid) / "comm").read_text().strip()
    except OSError:
        return None


def cpu_seconds(stat: str) -> float:
    """User + system of one /proc/PID/stat line; the command in it may hold blanks and parentheses."""
    fields = stat[stat.rindex(")") + 1 :].split()
    return (int(fields[_UTIME_FIELD]) + int(fields[_STIME_FIELD])) / _TICKS_PER_S


def resident_bytes(statm: str) -> int:
    return int(statm.split()[_STATM_RESIDENT_FIELD]) * _PAGE_BYTES


def cpus() -> int:
    """Those that we may run on."""
    return len(os.sched_getaffinity(0))


def machine_busy_seconds() -> float:
    """CPU seconds that all cores have spent since the machine started, on whatever."""
    return busy_seconds((_PROC / "stat").read_text())


def busy_seconds(stat: str) -> float:
    """Of the first line of /proc/stat: all but idle and waiting for disks; the last two repeat what others hold."""
    user, nice, system, _idle, _iowait, *rest = map(int, stat.partition("\n")[0].split()[1:9])
    return (user + nice + system + sum(rest)) / _TICKS_PER_S


def listen_overflows() -> int | None:
    """Connection attempts that met a full accept queue, since the machine started; None where the kernel tells none."""
    try:
        return netstat_value((_PROC / "net" / "netstat").read_text(), "ListenOverflows")
    except OSError:
        return None


def netstat_value(netstat: str, name: str) -> int | None:
    """One value of /proc/net/netstat: lines come in pairs, names above values."""
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
