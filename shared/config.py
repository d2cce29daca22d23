"""The configuration of a running gateway, as plain frozen values.

Parsing (flags, environment, TOML) and checking are in `gateway/settings/`. The workers only see these structs, which
they get as JSON over their control channel. Defaults and names are those of docs/interface.md.
"""

from __future__ import annotations

import msgspec

from shared.core.callers import ApiKey
from shared.core.upstream_protocol import ClientChoice, ProtocolChoice

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
# By how much a session's record outlives the session and its results.
SESSION_MARGIN_S = 300.0


class ModelName(msgspec.Struct, frozen=True):
    """A base model that clients may sample, and the upstream's name for it."""

    name: str
    upstream_name: str

    @property
    def flag(self) -> str:
        """The model as a value of `--model`."""
        return self.name if self.name == self.upstream_name else f"{self.name}={self.upstream_name}"


class ImageToken(msgspec.Struct, frozen=True):
    """The token that represents an image in the prompts of a base model. `model` is its name for clients."""

    model: str
    token_id: int


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `gateway serve`; docs/interface.md explains each."""

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    source_ips: tuple[str, ...] = ()
    upstreams: tuple[str, ...] = ()
    upstream_protocol: ProtocolChoice = ProtocolChoice.COMPLETIONS
    upstream_client: ClientChoice = ClientChoice.OWN
    upstream_api_key: str | None = None
    models: tuple[ModelName, ...] = ()
    image_tokens: tuple[ImageToken, ...] = ()
    redis_url: str | None = None
    key_prefix: str = "gw"
    undelivered_ttl_s: float = 3600.0
    retrieved_ttl_s: float = 300.0
    acked_ttl_s: float = 30.0
    lease_s: float = 30.0
    redis_memory_bytes: int = 0  # 0: a quarter of RAM
    read_timeout_s: float = 2048.0
    attempt_timeout_s: float | None = None  # None: twice read_timeout_s
    connect_timeout_s: float = 60.0
    upstream_wait_s: float = 2048.0
    upstream_keep_alive_s: float = 4.0
    max_connections: int | None = None  # None: as many as the source IP has ephemeral ports for; 0: no limit
    max_in_flight: int = 65_536
    max_in_flight_bytes: int = GIB
    max_body_bytes: int = 64 * MIB
    max_reexecutions: int = 1
    retry_ambiguous: bool = False
    keep_alive_s: float = 75.0
    backlog: int = 50_000
    poll_timeout_s: float = 30.0
    session_timeout_s: float = 300.0
    lora_name: str | None = None
    lora_path: str | None = None
    lora_wait_s: float = 60.0
    session_poll: bool = True
    training_upstream: str | None = None
    training_api_key: str | None = None
    training_forward_key: bool = False
    api_keys: tuple[ApiKey, ...] | None = None  # None: no keys file, everybody is anonymous; (): nobody is admitted
    allow_anonymous: bool = False
    admin_host: str = "127.0.0.1"
    admin_port: int = 8001
    admin_key: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    drain_timeout_s: float = 60.0
    warm_spare: bool = True
    log_format: str = "json"
    log_level: str = "info"
    access_log: bool = False
    otel_endpoint: str | None = None
    run_dir: str | None = None

    @property
    def lora_name_template(self) -> str:
        """The template of adapter names.

        Its default depends on whether adapters are loaded on demand: then names must be unique for each checkpoint.
        """
        if self.lora_name is not None:
            return self.lora_name
        return "{run_id}--{checkpoint}" if self.lora_path is not None else "{run_id}"

    @property
    def session_ttl_s(self) -> float:
        """How long the store keeps what it knows of a session after the session's last sign of life.

        A session that is kept for as long as its results cannot be taken for another one that is new.
        """
        return max(self.session_timeout_s, self.undelivered_ttl_s) + SESSION_MARGIN_S

    @property
    def longest_attempt_s(self) -> float:
        """From sending a request to an upstream to the end of its reply."""
        return 2 * self.read_timeout_s if self.attempt_timeout_s is None else self.attempt_timeout_s


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one worker process: the settings, its slot, and what the supervisor resolved for it."""

    settings: Settings
    slot: int
    instance: str  # 16 characters, new for each process: the owner of samples in the store
    source_ip: str | None
    redis_url: str  # that of the embedded server if none was given
