"""What supervisor and worker say to each other, over one inherited UNIX socket pair, a JSON object per line.

    supervisor -> worker   prepare (a spare, first), start (once), drain, reload
    worker -> supervisor   warm (a spare, every second), ready, status (every second: it is also the heartbeat), failed

With `start` travels the slot's listening socket, as a descriptor (SCM_RIGHTS). A spare does not know its slot while it
waits, and it must hold no other: a spare that inherited all listening sockets and was then stopped would keep the
gateway's port taken after everybody else is gone. What is started cold gets its socket the same way, so that the two
differ in nothing.

The socket also tells of death: a worker that reads end-of-file has lost its supervisor and exits; a supervisor that
reads it has lost the worker (and has the exit code from the process).
"""

from __future__ import annotations

import msgspec

from shared.config import Settings, WorkerConfig

STATUS_INTERVAL_S = 1.0


class Prepare(msgspec.Struct, tag="prepare", frozen=True):
    """Import everything, without haste, and wait for the start."""


class Start(msgspec.Struct, tag="start", frozen=True):
    """Serve; the slot's listening socket comes with the first byte."""

    config: WorkerConfig


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Stop taking samples, answer polls, let what runs end for `deadline_s`, orphan the rest, exit 0.

    `replaced`: another worker already serves the slot, so stop accepting at once. Where the results end with the
    supervisor's own Redis, a worker whose samples have ended keeps answering polls until the deadline, or until it is
    told to drain a second time: then all results have been fetched.
    """

    deadline_s: float
    replaced: bool = False


class Reload(msgspec.Struct, tag="reload", frozen=True):
    """Keys and limits as re-read; what cannot change at run time is ignored."""

    settings: Settings


class Warm(msgspec.Struct, tag="warm", frozen=True):
    """Everything is imported."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The worker accepts connections. `models`: the base models it offers."""

    models: tuple[str, ...]


class UpstreamStatus(msgspec.Struct, frozen=True):
    url: str
    state: str  # "up", "resting", "unknown", or "leaving": off the list, and ending what runs there
    in_flight: int
    failures: int  # in a row
    # Since the start of this process; the two histograms as `shared/histogram.py` makes them.
    attempts: int = 0
    faults: int = 0
    wasted_ms: int = 0
    queue: tuple[float, ...] = ()
    latency: tuple[float, ...] = ()
    protocol: str | None = None  # how it is asked for samples; None while that is not known
    lacks_generate: bool = False  # --upstream-protocol generate, and a sample has found that it does not have it


class KeyStatus(msgspec.Struct, frozen=True):
    """What one API key, by the operator's name for it, holds of a worker now, and has asked of it since it started."""

    name: str
    in_flight: int
    in_flight_bytes: int
    samples: int
    rejected: int


class Status(msgspec.Struct, tag="status", frozen=True):
    """A worker's own view of itself. Counters count from the start of this process."""

    in_flight: int
    in_flight_bytes: int
    loop_lag_ms_p99: float
    loop_lag_ms_max: float
    store_connected: bool
    sessions: int
    upstreams: tuple[UpstreamStatus, ...]
    counters: dict[str, int]  # names: shared/counters.py
    draining: bool = False
    paused: int = 0  # samples that wait until an upstream takes them
    passed_in_flight: int = 0  # requests that are passed through
    stages: dict[str, tuple[float, ...]] = {}  # histograms by the names of `shared.counters.Stages`
    keys: tuple[KeyStatus, ...] = ()  # those of the keys file that have asked for anything here
    missing_models: tuple[str, ...] = ()  # those of --model, as the flag has them, that no upstream lists


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The worker cannot start, and would not the next time either."""

    message: str


ToWorker = Prepare | Start | Drain | Reload
ToSupervisor = Warm | Ready | Status | Failed

MAX_LINE_BYTES = 4 * 1024 * 1024

_encoder = msgspec.json.Encoder()
_to_worker = msgspec.json.Decoder(ToWorker)
_to_supervisor = msgspec.json.Decoder(ToSupervisor)


def encode(message: ToWorker | ToSupervisor) -> bytes:
    return _encoder.encode(message) + b"\n"


def decode_for_worker(line: bytes) -> ToWorker:
    """Raises `msgspec.MsgspecError` on anything else."""
    return _to_worker.decode(line)


def decode_for_supervisor(line: bytes) -> ToSupervisor:
    """Raises `msgspec.MsgspecError` on anything else."""
    return _to_supervisor.decode(line)
