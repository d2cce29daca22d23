"""How many connections one source IP can open: arithmetic over the kernel's ephemeral port range."""

from __future__ import annotations

from typing import Final

# Linux' own default for net.ipv4.ip_local_port_range.
DEFAULT_RANGE: Final = (32768, 60999)
# Left to everything else on the machine that connects from the same address, and to sockets in TIME_WAIT.
RESERVE: Final = 0.1


def connection_limit(port_range: tuple[int, int], upstream_addresses: int, workers_on_the_address: int = 1) -> int:
    """Connections that one worker can open from its source IP; at least 1.

    Ports are spent per destination, so every upstream address adds a whole range; workers that share a source IP
    share it.
    """
    low, high = port_range
    ports = max(high - low + 1, 1)
    usable = int(ports * (1 - RESERVE)) * max(upstream_addresses, 1)
    return max(usable // max(workers_on_the_address, 1), 1)
