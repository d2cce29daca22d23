"""The messages between supervisor and worker, over one inherited UNIX socket pair, a JSON object per line.

    supervisor -> worker   prepare (a spare, first), start (once), drain, reload
    worker -> supervisor   warm (a spare, every second), ready, status (every second: it is also the heartbeat), failed

The slot's listening socket is sent with `start`, as a descriptor (SCM_RIGHTS). A spare does not know its slot while it
waits, and must hold no other slot's socket: a spare that inherited all listening sockets and was then stopped would
keep the gateway's port occupied after everything else has ended. A worker that is started cold gets its socket the same
way, so that both behave alike.

The channel also reports death: a worker that reads end-of-file has lost its supervisor and exits; a supervisor that
reads it has lost the worker (and gets the exit code from the process).
"""

from __future__ import annotations

import msgspec

from shared.config import Settings, WorkerConfig

STATUS_INTERVAL_S = 1.0


class Prepare(msgspec.Struct, tag="prepare", frozen=True):
    """Import everything at low priority, and wait for the start."""


class Start(msgspec.Struct, tag="start", frozen=True):
    """Serve. The slot's listening socket comes with the first byte."""

    config: WorkerConfig


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Stop taking samples, answer polls, give running samples `deadline_s` to end, orphan the rest, exit 0.

    `replaced`: another worker already serves the slot, so stop accepting at once. If the results end with the
    supervisor's own Redis, a worker whose samples have ended keeps answering polls until the deadline, or until it
    gets a second order to drain, which means that all results were fetched.
    """

    deadline_s: float
    replaced: bool = False


class Reload(msgspec.Struct, tag="reload", frozen=True):
    """Use these keys and limits; settings that cannot change at run time are ignored."""

    settings: Settings


class Warm(msgspec.Struct, tag="warm", frozen=True):
    """Report that everything is imported."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Report that the worker accepts connections. `models`: the base models that it offers."""

    models: tuple[str, ...]


class UpstreamStatus(msgspec.Struct, frozen=True):
    """One worker's view of an upstream."""

    url: str
    state: str  # "up", "resting", "unknown", or "leaving": off the list, and ending what runs there
    in_flight: int
    failures: int  # in a row
    # Since the start of this process. The two histograms are snapshots of `shared/histogram.py`.
    attempts: int = 0
    faults: int = 0
    wasted_ms: int = 0
    queue: tuple[float, ...] = ()
    latency: tuple[float, ...] = ()
    protocol: str | None = None  # how it is asked for samples; None while that is unknown
    lacks_generate: bool = False  # with --upstream-protocol generate, a sample found that it lacks the endpoint


class KeyStatus(msgspec.Struct, frozen=True):
    """The samples of one API key in a worker: those in flight now, and those asked for since the worker started.

    `name` is the operator's name for the key.
    """

    name: str
    in_flight: int
    in_flight_bytes: int
    samples: int
    rejected: int


class Status(msgspec.Struct, tag="status", frozen=True):
    """A worker's view of itself. Counters count from the start of this process."""

    in_flight: int
    in_flight_bytes: int
    loop_lag_ms_p99: float
    loop_lag_ms_max: float
    store_connected: bool
    sessions: int
    upstreams: tuple[UpstreamStatus, ...]
    counters: dict[str, int]  # names: shared/counters.py
    draining: bool = False
    paused: int = 0  # samples that wait for an upstream to take them
    passed_in_flight: int = 0  # requests that are passed through
    stages: dict[str, tuple[float, ...]] = {}  # histograms by the names of `shared.counters.Stages`
    keys: tuple[KeyStatus, ...] = ()  # the keys of the keys file that have asked for anything here
    missing_models: tuple[str, ...] = ()  # the values of --model that no upstream lists


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Report that the worker cannot start, and would not the next time either."""

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
    """Decode an order. Raise `msgspec.MsgspecError` if it is none."""
    return _to_worker.decode(line)


def decode_for_supervisor(line: bytes) -> ToSupervisor:
    """Decode a report. Raise `msgspec.MsgspecError` if it is none."""
    return _to_supervisor.decode(line)
