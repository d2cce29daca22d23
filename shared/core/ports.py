"""How many connections one source IP can open: arithmetic over the kernel's ephemeral port range."""

from __future__ import annotations

from typing import Final

# Linux' own default for net.ipv4.ip_local_port_range.
DEFAULT_RANGE: Final = (32768, 60999)
# Left to everything else on the machine that connects from the same address, and to sockets in TIME_WAIT.
RESERVE: Final = 0.1
# Of a worker's file descriptors, what upstream connections may take; the other half is for its clients.
_SHARE_OF_FILES: Final = 0.5


def connection_limit(
    port_range: tuple[int, int],
    upstream_addresses: int,
    workers_on_the_address: int = 1,
    open_files: int | None = None,
) -> int:
    """Return how many connections one worker can open from its source IP, at least 1.

    Ports are spent per destination, so every upstream address adds a whole range; workers that share a source IP
    share it. `open_files`: how many descriptors the process may have, None for no limit.
    """
    low, high = port_range
    ports = max(high - low + 1, 1)
    usable = int(ports * (1 - RESERVE)) * max(upstream_addresses, 1)
    of_ports = usable // max(workers_on_the_address, 1)
    of_files = int(open_files * _SHARE_OF_FILES) if open_files is not None else of_ports
    return max(min(of_ports, of_files), 1)
