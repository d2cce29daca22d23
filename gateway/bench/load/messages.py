"""What the driver and its client processes say to each other: a JSON object per line, over standard input and output.

driver -> client   Plan (once, first), Go; end of file means stop
client -> driver   Ready, Progress (a few times a second), then Report; or Trouble, and nothing more
"""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.bench.load.workload import Workload


class Plan(msgspec.Struct, tag="plan", frozen=True, kw_only=True):
    """One client process's share: samples `first`, `first + step`, ... below `samples`.

    `stuck_after_s`: without one sample ending for so long, the run ends.
    """

    url: str
    source_ip: str | None
    api_key: str
    workload: Workload
    session_poll: bool | None
    verify: bool
    first: int
    step: int
    samples: int
    concurrency: int
    heartbeat_s: float
    stuck_after_s: float


class Go(msgspec.Struct, tag="go", frozen=True):
    pass


class ClientReady(msgspec.Struct, tag="ready", frozen=True):
    """`session_poll`: None where the SDK decides, and tells nobody. `sdk_version`: None for the raw client."""

    session_poll: bool | None
    sdk_version: str | None = None


class Progress(msgspec.Struct, tag="progress", frozen=True):
    submitted: int
    completed: int
    failed: int
    wrong: int
    cancelled: int


class ClientReport(msgspec.Struct, tag="report", frozen=True, kw_only=True):
    """`submit_s`, `latency_s`: float32 little-endian; `spans_s`, `promises_s`: float64[n, 2] (tally.py).

    `cpu_seconds`: user + system, from Go to the last sample. None: what happens inside the SDK, where nobody counts.
    """

    completed: int
    failed: int
    wrong: int
    cancelled: int
    resubmitted: int
    duplicates: int
    abandoned_polls: int
    polls: int | None = None
    session_polls: int | None = None
    paused: int | None = None
    requests: int | None = None
    connections: int | None = None
    sent_bytes: int | None = None
    received_bytes: int | None = None
    heartbeats: int | None = None
    heartbeats_failed: int | None = None
    heartbeat_max_s: float | None = None
    failures: dict[str, int]
    examples: list[str]
    submit_s: bytes
    latency_s: bytes
    spans_s: bytes
    promises_s: bytes
    cpu_seconds: float
    peak_rss_bytes: int


class Trouble(msgspec.Struct, tag="trouble", frozen=True):
    """The client cannot go on; one sentence for a person."""

    message: str


FromClient = ClientReady | Progress | ClientReport | Trouble
ToClient = Plan | Go

# A report of a million samples is some 54 MB of base64.
MAX_LINE_BYTES: Final = 128 * 1024 * 1024

_encoder = msgspec.json.Encoder()
_from_client = msgspec.json.Decoder(FromClient)
_to_client = msgspec.json.Decoder(ToClient)


def encode(message: FromClient | ToClient) -> bytes:
    return _encoder.encode(message) + b"\n"


def decode_for_driver(line: bytes) -> FromClient:
    """Raises `msgspec.MsgspecError` on anything else."""
    return _from_client.decode(line)


def decode_for_client(line: bytes) -> ToClient:
    """Raises `msgspec.MsgspecError` on anything else."""
    return _to_client.decode(line)
