"""Bytes over a set of connections, as the load client and the simulated vLLM count them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """HTTP's bytes, without TCP's and IP's headers; over TLS, before encryption."""

    sent_bytes: int = 0
    received_bytes: int = 0
