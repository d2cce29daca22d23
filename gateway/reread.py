"""What a running gateway takes from a configuration that is read again. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from shared.config import Settings

# Bound, opened or counted once; a roll cannot change them.
_FIXED_AT_START: Final = (
    "host",
    "port",
    "workers",
    "source_ips",
    "backlog",
    "redis_url",
    "redis_memory_bytes",
    "key_prefix",
    "admin_host",
    "admin_port",
    "admin_key",
    "run_dir",
)


def for_running_gateway(new: Settings, running: Settings) -> Settings:
    """`new`, but for what the sockets and the number of slots have settled; the rest goes to the new workers."""
    return msgspec.structs.replace(new, **{name: getattr(running, name) for name in _FIXED_AT_START})


def roll_deadline_s(settings: Settings) -> float:
    """Longer than any sample can run: a roll waits for all of them."""
    return settings.upstream_wait_s + settings.read_timeout_s * (1 + settings.max_reexecutions)
