"""What the kernel reports and allows: file descriptors, memory, ports, addresses, and what a process uses."""

from __future__ import annotations

import importlib
import os
import resource
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.core.errors import StartError
from shared.core.ports import DEFAULT_RANGE

_CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

# Workers need these. What uvicorn falls back to costs two to four times the CPU and has other limits.
_NEEDED: Final = ("uvloop", "httptools")


@dataclass(frozen=True, slots=True)
class Usage:
    """The use of a process: user and system time so far, and resident memory."""

    cpu_seconds: float = 0.0
    rss_bytes: int = 0


def usage(pid: int) -> Usage:
    """Return what a process uses, or zeros if it is gone."""
    try:
        # The command name in parentheses may hold anything, so count the fields after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return Usage()
    user, system, resident = int(fields[11]), int(fields[12]), int(fields[21])
    return Usage((user + system) / _CLOCK_TICKS, resident * _PAGE_BYTES)


def raise_fd_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return it. Workers inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def memory_bytes() -> int:
    """Return the memory that may be used: the machine's, or the control group's limit if that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return total


def ephemeral_ports() -> tuple[int, int]:
    """Return the first and the last port that the kernel gives to outgoing connections."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return DEFAULT_RANGE


def reserved_ports() -> list[range]:
    """Return the ports of that range that the kernel gives to no outgoing connection."""
    try:
        return parse_ports(Path("/proc/sys/net/ipv4/ip_local_reserved_ports").read_text().strip())
    except OSError:
        return []


def parse_ports(text: str) -> list[range]:
    """Parse a list of ports as the kernel writes it: `6379,8000-8001`."""
    spans = [span.partition("-") for span in text.split(",") if span]
    return [range(int(first), int(last or first) + 1) for first, _, last in spans]


def source_ip_refusal(address: str) -> str | None:
    """Explain why a source IP cannot be bound, or return None if it can."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return error.strerror or str(error)
    return None


def check_source_ips(addresses: tuple[str, ...]) -> None:
    """Raise `StartError` for the first address that cannot be bound."""
    for address in addresses:
        if (reason := source_ip_refusal(address)) is not None:
            raise StartError(f"--source-ips: {address} cannot be bound ({reason}); add it to a network interface first")


def missing_libraries() -> list[str]:
    return [name for name in _NEEDED if not _importable(name)]


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def check_libraries(*, tracing: bool = False) -> None:
    """Raise `StartError` if a library that the workers need is missing."""
    if tracing and not _importable("workers.samples.tracing"):
        raise StartError(
            "--otel-endpoint: OpenTelemetry is not installed; in the gateway's checkout: pip install '.[otel]'"
        )
    if missing := missing_libraries():
        raise StartError(f"{' and '.join(missing)} cannot be imported; install the gateway's dependencies again")
