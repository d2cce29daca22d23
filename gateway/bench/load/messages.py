"""The messages between the driver and its client processes: one JSON object per line, on standard input and output.

driver -> client   Plan (once, first), Go; end of file means stop
client -> driver   ClientReady, Progress (a few times a second), then ClientReport; or Trouble, and nothing more
"""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.bench.load.workload import Workload


class Plan(msgspec.Struct, tag="plan", frozen=True, kw_only=True):
    """The share of one client process: samples `first`, `first + step`, ... below `samples`.

    The run ends if no sample ends within `stuck_after_s`.
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
    """The client has its session. `session_poll`: None if the SDK decides. `sdk_version`: None for the raw client."""

    session_poll: bool | None
    sdk_version: str | None = None


class Progress(msgspec.Struct, tag="progress", frozen=True):
    submitted: int
    completed: int
    failed: int
    wrong: int
    cancelled: int

    @property
    def ended(self) -> int:
        return self.completed + self.failed + self.cancelled


class ClientReport(msgspec.Struct, tag="report", frozen=True, kw_only=True):
    """The counts and times of one client process (tally.py).

    `submit_s` and `latency_s` are float32[n], `spans_s` and `promises_s` float64[n, 2], little-endian. `cpu_seconds` is
    user + system from Go to the last sample. None marks what the SDK does inside, where it cannot be counted.
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
    """The client cannot continue; `message` is one sentence for a person."""

    message: str


FromClient = ClientReady | Progress | ClientReport | Trouble
ToClient = Plan | Go

# The report of a million samples is about 54 MB of base64.
MAX_LINE_BYTES: Final = 128 * 1024 * 1024

_encoder = msgspec.json.Encoder()
_from_client = msgspec.json.Decoder(FromClient)
_to_client = msgspec.json.Decoder(ToClient)


def encode(message: FromClient | ToClient) -> bytes:
    return _encoder.encode(message) + b"\n"


def decode_for_driver(line: bytes) -> FromClient:
    """Decode one line. Raises `msgspec.MsgspecError` on anything else."""
    return _from_client.decode(line)


def decode_for_client(line: bytes) -> ToClient:
    """Decode one line. Raises `msgspec.MsgspecError` on anything else."""
    return _to_client.decode(line)
