"""The one table of everything that `gateway serve` can be told.

Each row is a command line flag, an environment variable (`GATEWAY_` and the name in capitals) and a key of the TOML
file given with `--config`. How a value is chosen among those, and which values exclude each other, is in `options.py`.
"""

from __future__ import annotations

from typing import Final

from gateway.settings import flag as words
from gateway.settings import quantities as q
from gateway.settings import urls
from gateway.settings.flag import Flag, repeatable, single, switch
from gateway.settings.urls import parse_source_ips
from shared.config import MIB

_SERVE: Final = "Serving"
_UPSTREAM: Final = "Upstreams"
_STORE: Final = "Results (Redis)"
_LIMITS: Final = "Limits"
_CLIENTS: Final = "Clients"
_ACCESS: Final = "Access"
_OPERATE: Final = "Operation"

_PORT: Final = q.whole(0, 65_535)
_SECONDS: Final = q.duration_s()


FLAGS: Final[tuple[Flag, ...]] = (
    single(
        _SERVE,
        "host",
        words.text,
        "ADDRESS",
        "127.0.0.1",
        "Public address to listen on, IPv4 or IPv6. Anything but loopback needs --api-keys-file or --allow-anonymous.",
    ),
    single(_SERVE, "port", _PORT, "PORT", "8000", "Public port; 0 takes a free one, which the start line then names."),
    single(
        _SERVE,
        "workers",
        q.whole(1, 1024),
        "N",
        "number of CPUs",
        "Worker processes. More than there are CPUs help only when each needs a source IP of its own.",
    ),
    single(
        _SERVE,
        "source-ips",
        parse_source_ips,
        "LIST",
        "none",
        "Local addresses for connections to the upstreams: addresses, ranges (10.0.0.10-10.0.0.25) and networks"
        " (10.0.0.16/28), comma separated; worker i binds the (i mod n)-th. One address reaches about 28,000"
        " connections to one upstream; give more when you need more in flight. `gateway check` does the arithmetic.",
    ),
    single(
        _SERVE,
        "backlog",
        q.whole(1, 1_000_000),
        "N",
        "50000",
        "Connections that may queue for one worker. Linux silently cuts it to net.core.somaxconn; the start warns.",
    ),
    single(_SERVE, "tls-cert", words.text, "PATH", "none", "PEM certificate chain: serve HTTPS. Needs --tls-key."),
    single(_SERVE, "tls-key", words.text, "PATH", "none", "PEM private key of --tls-cert."),
    repeatable(
        _UPSTREAM,
        "upstream",
        urls.upstream_url,
        "URL",
        "required",
        "Base URL of a vLLM server, or of a router before many, without /v1. Repeat it for several. vLLM needs"
        " --logprobs-mode processed_logprobs for logprobs that heed the temperature.",
    ),
    single(
        _UPSTREAM,
        "upstream-protocol",
        words.upstream_protocol,
        "completions|generate|auto",
        "completions",
        "How upstreams are asked: by /v1/completions, or by /inference/v1/generate (vLLM's --enable-scale-out), which"
        " takes long stop lists and tells when weights changed under a generation. auto: what each upstream has.",
    ),
    single(
        _UPSTREAM,
        "upstream-api-key-file",
        words.text,
        "PATH",
        "none",
        "File whose content is sent to the upstreams as `Authorization: Bearer`.",
    ),
    repeatable(
        _UPSTREAM,
        "model",
        urls.model_name,
        "NAME[=UPSTREAM_NAME]",
        "all base models of the upstreams",
        "A base model to offer, and the upstream's name for it when that differs. Repeat it for several.",
    ),
    repeatable(
        _UPSTREAM,
        "image-token",
        urls.image_token,
        "NAME=ID",
        "none",
        "The token that stands for an image in prompts of a base model (<|image_pad|>, say): images are then passed on"
        " to upstreams with /inference/v1/generate. Repeat it for several models.",
    ),
    single(
        _UPSTREAM,
        "read-timeout",
        _SECONDS,
        "SECONDS",
        "2048",
        "Longest silence of an upstream, which is the deadline of one generation. Raise it for very long ones.",
    ),
    single(
        _UPSTREAM,
        "connect-timeout",
        _SECONDS,
        "SECONDS",
        "60",
        "For one connection attempt, without the wait for a free connection. A saturated router accepts slowly.",
    ),
    single(
        _UPSTREAM,
        "upstream-wait",
        _SECONDS,
        "SECONDS",
        "2048",
        "How long a sample that no upstream ever executed is tried again before it fails.",
    ),
    single(
        _UPSTREAM,
        "upstream-keep-alive",
        _SECONDS,
        "SECONDS",
        "4",
        "Idle upstream connections are closed after this. Stay below the upstream's own limit: 5 s for vLLM.",
    ),
    single(
        _UPSTREAM,
        "max-connections",
        words.max_connections,
        "auto|0|N",
        "auto",
        "Upstream connections per worker. auto: what its source IP's ports allow; 0: no limit. Requests above it wait.",
    ),
    single(
        _UPSTREAM,
        "max-reexecutions",
        q.whole(0, 100),
        "N",
        "1",
        "How often an interrupted generation (connection lost, dead engine) runs again before the client hears.",
    ),
    switch(
        _UPSTREAM,
        "retry-ambiguous",
        "Also run again after failures that may have been complete generations: read timeouts, 502, 504.",
    ),
    single(
        _UPSTREAM,
        "lora-name",
        words.text,
        "TEMPLATE",
        "{run_id}",
        "How tinker://RUN/sampler_weights/CHECKPOINT becomes an upstream model name, from {run_id} and {checkpoint}."
        " With {run_id} alone older samplers follow the newest weights.",
    ),
    single(
        _UPSTREAM,
        "lora-path",
        words.text,
        "TEMPLATE",
        "none",
        "Where the upstreams find an adapter, such as /adapters/{run_id}/{checkpoint}: the gateway loads it into each"
        " of them when it is first sampled. They need --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.",
    ),
    single(
        _UPSTREAM,
        "lora-wait",
        _SECONDS,
        "SECONDS",
        "60",
        "How long a sample waits for an adapter that the upstreams cannot load, or do not list, before it fails.",
    ),
    single(
        _STORE,
        "redis-url",
        urls.redis_url,
        "URL",
        "an embedded server",
        "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://. Needed for several hosts, and for results"
        " that outlive a restart.",
    ),
    single(
        _STORE, "key-prefix", words.key_prefix, "NAME", "gw", "How every key in Redis begins: several may share one."
    ),
    single(
        _STORE,
        "redis-memory",
        q.size_bytes(8 * MIB),
        "SIZE",
        "a quarter of RAM",
        "maxmemory of the embedded server. When it is full, new samples get 429; no result is dropped.",
    ),
    single(
        _STORE,
        "undelivered-ttl",
        _SECONDS,
        "SECONDS",
        "3600",
        "How long a result that nobody fetched is kept. It must outlive the longest time a client may be away.",
    ),
    single(
        _STORE,
        "retrieved-ttl",
        _SECONDS,
        "SECONDS",
        "300",
        "How long a fetched result is kept, for a client that lost the reply and asks again.",
    ),
    single(_STORE, "acked-ttl", _SECONDS, "SECONDS", "30", "How long a result is kept that the client has confirmed."),
    single(
        _STORE,
        "lease",
        q.duration_s(at_least=1.0),
        "SECONDS",
        "30",
        "After this long without a renewal (every 5 s, or three times in it) the samples of a lost host are given up.",
    ),
    single(
        _LIMITS,
        "max-in-flight",
        q.whole(1, 10_000_000),
        "N",
        "65536",
        "Samples in flight per worker; above it `asample` gets 429 and the SDK slows down.",
    ),
    single(
        _LIMITS,
        "max-in-flight-bytes",
        q.size_bytes(),
        "SIZE",
        "1GiB",
        "Prompts and unsaved results in flight per worker; above it `asample` gets 429.",
    ),
    single(
        _LIMITS,
        "max-body-bytes",
        q.size_bytes(1024),
        "SIZE",
        "64MiB",
        "Largest request body; above it 413. A compressed one is refused with 415.",
    ),
    single(
        _CLIENTS,
        "keep-alive",
        _SECONDS,
        "SECONDS",
        "75",
        "Idle client connections are closed after this. Stay above the idle time of a load balancer in front.",
    ),
    single(
        _CLIENTS,
        "poll-timeout",
        q.duration_s(at_most=30.0),
        "SECONDS",
        "30",
        "How long a retrieve is held before the client is told to try again. The SDK gives up after 45 s.",
    ),
    single(
        _CLIENTS,
        "session-timeout",
        _SECONDS,
        "SECONDS",
        "300",
        "A session without a heartbeat, submission or poll for this long has its running samples cancelled.",
    ),
    single(
        _CLIENTS,
        "session-poll",
        words.session_poll,
        "auto|off",
        "auto",
        "Whether SDKs from 0.27.2 on are offered one poll per session in place of one per sample.",
    ),
    single(
        _CLIENTS,
        "training-upstream",
        urls.training_url,
        "URL",
        "none",
        "Base URL of a Tinker training server, without /api/v1: everything that is not sampling is passed to it.",
    ),
    single(
        _CLIENTS,
        "training-api-key-file",
        words.text,
        "PATH",
        "none",
        "File whose content the training server gets as X-API-Key, from every client. Without it, it gets no key.",
    ),
    switch(
        _CLIENTS,
        "training-forward-key",
        "Send the client's own key on to the training server, which then tells clients apart by itself.",
    ),
    single(
        _ACCESS,
        "api-keys-file",
        words.text,
        "PATH",
        "none",
        "TOML file of the API keys that are let in, with their limits; `gateway keys` writes it. Read again on SIGHUP.",
    ),
    switch(_ACCESS, "allow-anonymous", "Serve an address that is not loopback without any API key."),
    single(
        _ACCESS,
        "admin-host",
        words.text,
        "ADDRESS",
        "127.0.0.1",
        "Operators' address (/status, /metrics, /readyz). Anything but loopback needs --admin-key-file.",
    ),
    single(_ACCESS, "admin-port", _PORT, "PORT", "8001", "Operators' port; 0 takes a free one."),
    single(
        _ACCESS,
        "admin-key-file",
        words.text,
        "PATH",
        "none",
        "File with the key that operators send as X-Admin-Key or `Authorization: Bearer`.",
    ),
    single(
        _OPERATE,
        "drain-timeout",
        q.duration_s(at_least=0.0),
        "SECONDS",
        "60",
        "On SIGTERM, how long running samples may take to end before they are given up.",
    ),
    switch(
        _OPERATE,
        "warm-spare",
        "Keep one more process, with everything imported, to take the place of a worker that dies. A worker's memory.",
        "on",
    ),
    single(
        _OPERATE,
        "log-format",
        q.choice("auto", "text", "json"),
        "auto|text|json",
        "auto",
        "auto: text on a terminal, else one JSON object a line.",
    ),
    single(
        _OPERATE,
        "log-level",
        q.choice("debug", "info", "warning", "error"),
        "LEVEL",
        "info",
        "debug, info, warning or error. Prompts, tokens and keys are never logged.",
    ),
    switch(_OPERATE, "access-log", "Log a line for every request to the public address."),
    single(
        _OPERATE,
        "otel-endpoint",
        urls.collector_url,
        "URL",
        "none",
        "OpenTelemetry collector (OTLP over HTTP) that gets a span for each sample. Needs the extra `otel`.",
    ),
    single(
        _OPERATE,
        "run-dir",
        words.text,
        "PATH",
        "under $XDG_RUNTIME_DIR",
        "Directory for sockets, the pid file and the embedded Redis; made private (0700). One gateway each.",
    ),
)

BY_KEY: Final = {flag.key: flag for flag in FLAGS}
