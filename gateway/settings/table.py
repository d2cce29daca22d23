"""The table of all flags of `gateway serve`.

Each row is a command line flag, an environment variable (`GATEWAY_` and the name in capitals) and a key of the TOML
file that `--config` names. `resolve.py` decides which of the three counts, and which values exclude each other.
"""

from __future__ import annotations

from typing import Final

from gateway.settings import flag as values
from gateway.settings import quantities, urls
from gateway.settings.flag import Flag, switch
from shared.config import MIB

_SERVE: Final = "Serving"
_UPSTREAM: Final = "Upstreams"
_STORE: Final = "Results (Redis)"
_LIMITS: Final = "Limits"
_CLIENTS: Final = "Clients"
_ACCESS: Final = "Access"
_OPERATE: Final = "Operation"

_port: Final = quantities.whole(0, 65_535)
_seconds: Final = quantities.duration_s()


def _duration(section: str, name: str, help_text: str, default: str) -> Flag:
    return Flag(section, name, _seconds, "SECONDS", help_text, default)


FLAGS: Final[tuple[Flag, ...]] = (
    Flag(
        _SERVE,
        "host",
        values.text,
        "ADDRESS",
        "Public address to listen on, IPv4 or IPv6. Any address but loopback needs --api-keys-file or"
        " --allow-anonymous.",
        "127.0.0.1",
    ),
    Flag(_SERVE, "port", _port, "PORT", "Public port; 0 picks a free one, which the start line names.", "8000"),
    Flag(
        _SERVE,
        "workers",
        quantities.whole(1, 1024),
        "N",
        "Worker processes. More workers than CPUs help only if each needs its own source IP.",
        "number of CPUs",
    ),
    Flag(
        _SERVE,
        "source-ips",
        urls.parse_source_ips,
        "LIST",
        "Local addresses for connections to the upstreams: addresses, ranges (10.0.0.10-10.0.0.25) and networks"
        " (10.0.0.16/28), separated by commas. Worker i uses address i mod n of n addresses. One address can hold about"
        " 28,000 connections to one upstream; give more addresses for more samples in flight. `gateway check` prints"
        " what your addresses allow.",
    ),
    Flag(
        _SERVE,
        "backlog",
        quantities.whole(1, 1_000_000),
        "N",
        "New connections that may queue for one worker. Linux silently lowers it to net.core.somaxconn; the gateway"
        " then logs a warning at start.",
        "50000",
    ),
    Flag(_SERVE, "tls-cert", values.text, "PATH", "PEM certificate chain, to serve HTTPS. Needs --tls-key."),
    Flag(_SERVE, "tls-key", values.text, "PATH", "PEM private key of --tls-cert."),
    Flag(
        _UPSTREAM,
        "upstream",
        urls.upstream_url,
        "URL",
        "Base URL of a vLLM server, or of a router in front of several, without /v1. Repeat the flag for several."
        " Start vLLM with --logprobs-mode processed_logprobs: without it, logprobs ignore the temperature.",
        "required",
        repeatable=True,
    ),
    Flag(
        _UPSTREAM,
        "upstream-protocol",
        values.upstream_protocol,
        "completions|generate|auto",
        "API used for samples. completions: /v1/completions. generate: /inference/v1/generate (vLLM started with"
        " --enable-scale-out), which accepts long stop lists and reports weights that change during a generation."
        " auto: generate where an upstream has it.",
        "completions",
    ),
    Flag(
        _UPSTREAM,
        "upstream-client",
        values.upstream_client,
        "own|aiohttp",
        "HTTP client that sends samples. aiohttp costs more than twice the CPU, and keys that wait take no turns.",
        "own",
    ),
    Flag(
        _UPSTREAM,
        "upstream-api-key-file",
        values.text,
        "PATH",
        "File with the key that is sent to the upstreams as `Authorization: Bearer`.",
    ),
    Flag(
        _UPSTREAM,
        "model",
        urls.model_name,
        "NAME[=UPSTREAM_NAME]",
        "A base model to offer, and its name at the upstreams if that differs. Repeat the flag for several.",
        "all base models of the upstreams",
        repeatable=True,
    ),
    Flag(
        _UPSTREAM,
        "image-token",
        urls.image_token,
        "NAME=ID",
        "Id of the token that stands for an image in prompts of base model NAME, such as the id of <|image_pad|>."
        " Prompts with images are then sent to upstreams that have /inference/v1/generate. Repeat the flag for several"
        " models.",
        repeatable=True,
    ),
    _duration(
        _UPSTREAM,
        "read-timeout",
        "Longest time that an upstream may stay silent. It limits one generation; raise it for very long ones.",
        "2048",
    ),
    _duration(
        _UPSTREAM,
        "attempt-timeout",
        "Longest time for a whole request and its reply.",
        "twice --read-timeout",
    ),
    _duration(
        _UPSTREAM,
        "connect-timeout",
        "Longest time for one connection attempt, not counting the wait for a free connection. A busy router accepts"
        " slowly.",
        "60",
    ),
    _duration(
        _UPSTREAM,
        "upstream-wait",
        "How long the gateway retries a sample that no upstream has started to execute, before the sample fails.",
        "2048",
    ),
    _duration(
        _UPSTREAM,
        "upstream-keep-alive",
        "Idle upstream connections are closed after this time. Keep it below the upstream's own limit, 5 s for vLLM.",
        "4",
    ),
    Flag(
        _UPSTREAM,
        "max-connections",
        values.max_connections,
        "auto|0|N",
        "Upstream connections per worker. auto: as many as the ports of its source IP allow. 0: no limit. Requests"
        " above the limit wait.",
        "auto",
    ),
    Flag(
        _UPSTREAM,
        "max-reexecutions",
        quantities.whole(0, 100),
        "N",
        "How often the gateway executes an interrupted generation again (connection lost, engine dead) before it"
        " reports the failure to the client.",
        "1",
    ),
    switch(
        _UPSTREAM,
        "retry-ambiguous",
        "Also execute again after failures that may have been complete generations: read timeouts, 502 and 504.",
    ),
    Flag(
        _UPSTREAM,
        "lora-name",
        values.text,
        "TEMPLATE",
        "Model name at the upstreams for tinker://RUN/sampler_weights/CHECKPOINT, made from {run_id} and {checkpoint}."
        " With {run_id} alone, older samplers follow the newest weights.",
        "{run_id}",
    ),
    Flag(
        _UPSTREAM,
        "lora-path",
        values.text,
        "TEMPLATE",
        "Where the upstreams find an adapter, such as /adapters/{run_id}/{checkpoint}. The gateway loads the adapter"
        " into each upstream when it is first sampled. vLLM needs --enable-lora and"
        " VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.",
    ),
    _duration(
        _UPSTREAM,
        "lora-wait",
        "How long a sample waits for an adapter that the upstreams cannot load or do not list, before it fails.",
        "60",
    ),
    Flag(
        _STORE,
        "redis-url",
        urls.redis_url,
        "URL",
        "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://. Needed for several hosts, and to keep"
        " results over a restart.",
        "an embedded server",
    ),
    Flag(
        _STORE, "key-prefix", values.key_prefix, "NAME", "Prefix of all keys; several gateways can share Redis.", "gw"
    ),
    Flag(
        _STORE,
        "redis-memory",
        quantities.size_bytes(8 * MIB),
        "SIZE",
        "maxmemory of the embedded server. When it is full, new samples get 429; no result is dropped.",
        "a quarter of RAM",
    ),
    _duration(
        _STORE,
        "undelivered-ttl",
        "How long a result is kept that no client has fetched. Make it longer than any client may be away.",
        "3600",
    ),
    _duration(
        _STORE,
        "retrieved-ttl",
        "How long a fetched result is kept, for a client that lost the reply and asks again.",
        "300",
    ),
    _duration(
        _STORE,
        "acked-ttl",
        "How long a result is kept after the client has acknowledged it.",
        "30",
    ),
    Flag(
        _STORE,
        "lease",
        quantities.duration_s(at_least=1.0),
        "SECONDS",
        "A worker renews its lease every 5 s, or three times per lease if that is shorter. After a lease without"
        " renewal its samples are given up.",
        "30",
    ),
    Flag(
        _LIMITS,
        "max-in-flight",
        quantities.whole(1, 10_000_000),
        "N",
        "Samples in flight per worker. Above it `asample` gets 429 and the SDK slows down.",
        "65536",
    ),
    Flag(
        _LIMITS,
        "max-in-flight-bytes",
        quantities.size_bytes(),
        "SIZE",
        "Memory per worker for prompts and unsaved results in flight. Above it `asample` gets 429.",
        "1GiB",
    ),
    Flag(
        _LIMITS,
        "max-body-bytes",
        quantities.size_bytes(1024),
        "SIZE",
        "Largest request body. A larger one gets 413, a compressed one 415.",
        "64MiB",
    ),
    _duration(
        _CLIENTS,
        "keep-alive",
        "Idle client connections are closed after this time. Keep it above the idle timeout of a load balancer in"
        " front.",
        "75",
    ),
    Flag(
        _CLIENTS,
        "poll-timeout",
        quantities.duration_s(at_most=30.0),
        "SECONDS",
        "How long a poll for a result may wait before the client is asked to try again. The SDK gives up after 45 s.",
        "30",
    ),
    _duration(
        _CLIENTS,
        "session-timeout",
        "Running samples of a session are cancelled after this time without a heartbeat, submission or poll.",
        "300",
    ),
    Flag(
        _CLIENTS,
        "session-poll",
        values.session_poll,
        "auto|off",
        "auto: offer SDKs from 0.27.2 on one poll per session instead of one per sample. off: never.",
        "auto",
    ),
    Flag(
        _CLIENTS,
        "training-upstream",
        urls.training_url,
        "URL",
        "Base URL of a Tinker training server, without /api/v1. All requests that are not sampling are passed to it.",
    ),
    Flag(
        _CLIENTS,
        "training-api-key-file",
        values.text,
        "PATH",
        "File with the key that the training server gets as X-API-Key, for every client. Without it the server gets"
        " no key.",
    ),
    switch(
        _CLIENTS,
        "training-forward-key",
        "Send each client's own key to the training server, which then tells the clients apart.",
    ),
    Flag(
        _ACCESS,
        "api-keys-file",
        values.text,
        "PATH",
        "TOML file with the accepted API keys and their limits; `gateway keys` writes it. Read again on SIGHUP.",
    ),
    switch(_ACCESS, "allow-anonymous", "Serve a non-loopback address without API keys: everybody may use it."),
    Flag(
        _ACCESS,
        "admin-host",
        values.text,
        "ADDRESS",
        "Address for operators (/status, /metrics, /readyz). Any address but loopback needs --admin-key-file.",
        "127.0.0.1",
    ),
    Flag(_ACCESS, "admin-port", _port, "PORT", "Port for operators; 0 picks a free one.", "8001"),
    Flag(
        _ACCESS,
        "admin-key-file",
        values.text,
        "PATH",
        "File with the key that operators send as X-Admin-Key or `Authorization: Bearer`.",
    ),
    Flag(
        _OPERATE,
        "drain-timeout",
        quantities.duration_s(at_least=0.0),
        "SECONDS",
        "After SIGTERM, how long running samples may take to end before they are given up.",
        "60",
    ),
    switch(
        _OPERATE,
        "warm-spare",
        "Keep one more process ready, with everything imported, to replace a worker that dies. It takes as much memory"
        " as an idle worker.",
        "on",
    ),
    Flag(
        _OPERATE,
        "log-format",
        quantities.choice("auto", "text", "json"),
        "auto|text|json",
        "text: lines for people. json: one JSON object per line. auto: text on a terminal, otherwise json.",
        "auto",
    ),
    Flag(
        _OPERATE,
        "log-level",
        quantities.choice("debug", "info", "warning", "error"),
        "LEVEL",
        "debug, info, warning or error. Prompts, tokens and keys are never logged.",
        "info",
    ),
    switch(_OPERATE, "access-log", "Log one line for each request to the public address."),
    Flag(
        _OPERATE,
        "otel-endpoint",
        urls.collector_url,
        "URL",
        "OpenTelemetry collector (OTLP over HTTP) that gets a span for each sample. Needs the extra `otel`.",
    ),
    Flag(
        _OPERATE,
        "run-dir",
        values.text,
        "PATH",
        "Directory for sockets, the pid file and the embedded Redis, made private (0700). Each gateway needs its own.",
        "a new one under $XDG_RUNTIME_DIR, or else under /tmp",
    ),
)

BY_KEY: Final = {flag.key: flag for flag in FLAGS}
