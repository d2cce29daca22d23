"""What a running gateway takes from a configuration that is read again. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from shared.config import Settings

# Bound, opened or counted once; a roll cannot change them. The field of Settings, and the flag that sets it.
_FIXED_AT_START: Final = {
    "host": "host",
    "port": "port",
    "workers": "workers",
    "source_ips": "source-ips",
    "backlog": "backlog",
    "redis_url": "redis-url",
    "redis_memory_bytes": "redis-memory",
    "key_prefix": "key-prefix",
    "admin_host": "admin-host",
    "admin_port": "admin-port",
    "admin_key": "admin-key-file",
    "run_dir": "run-dir",
}


def for_running_gateway(new: Settings, running: Settings) -> Settings:
    """`new`, but for what the sockets and the number of slots have settled; the rest goes to the new workers."""
    return msgspec.structs.replace(new, **{name: getattr(running, name) for name in _FIXED_AT_START})


def need_a_restart(new: Settings, running: Settings) -> list[str]:
    """The flags whose change `for_running_gateway` passes over."""
    return [f"--{flag}" for name, flag in _FIXED_AT_START.items() if getattr(new, name) != getattr(running, name)]


def roll_deadline_s(settings: Settings) -> float:
    """Longer than any sample can run: a roll waits for all of them."""
    return settings.upstream_wait_s + settings.read_timeout_s * (1 + settings.max_reexecutions)
