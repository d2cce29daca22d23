"""What the measurements of `gateway check` mean, and what to do about them. Pure; `check.py` measures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from gateway.settings.quantities import human_bytes
from gateway.supervision.backing import policy_refusal
from shared.core.ports import connection_limit
from shared.core.upstream_protocol import ProtocolChoice, UpstreamProtocol, has_generate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gateway.supervision.upstream_probe import OfferedModel
    from shared.config import ModelName, Settings
    from shared.store.contract import StoreInfo


class Verdict(Enum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the table. `advice` says what to do, one thing a line, and is empty if all is well."""

    subject: str
    verdict: Verdict
    detail: str
    advice: str = ""


# For a worker's listener, channel, Redis connections and libraries; the rest is for clients and upstreams.
_FDS_FOR_ITSELF: Final = 64
# With fewer, a worker cannot carry a usual rollout.
_FEW_FDS: Final = 4096
_CONNECTIONS: Final = "upstream connections"
_MORE_FILES: Final = (
    "raise the hard limit of file descriptors (ulimit -Hn; LimitNOFILE= in a systemd unit; ulimits: in a compose file)"
)
# The range in deploy/sysctl.conf.
_WIDEST: Final = (1024, 65535)
_LITTLE_REDIS_MEMORY_BYTES: Final = 256 << 20
# Far more than a slow reply explains, far less than a session's time-out.
_MUCH_SKEW_S: Final = 5.0


def ok(subject: str, detail: str) -> Finding:
    return Finding(subject, Verdict.OK, detail)


def warning(subject: str, detail: str, advice: str) -> Finding:
    return Finding(subject, Verdict.WARNING, detail, advice)


def failure(subject: str, detail: str, advice: str) -> Finding:
    return Finding(subject, Verdict.FAILURE, detail, advice)


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if serve would not work, otherwise 0."""
    return int(any(finding.verdict is Verdict.FAILURE for finding in findings))


def summary(findings: Sequence[Finding]) -> str:
    """Count the verdicts, in one line."""
    count = Counter(finding.verdict for finding in findings)
    plural = {verdict: "" if verdict is Verdict.OK or count[verdict] == 1 else "s" for verdict in Verdict}
    return ", ".join(f"{count[verdict]} {verdict.value}{plural[verdict]}" for verdict in Verdict)


def file_descriptors(hard_limit: int) -> Finding:
    free = hard_limit - _FDS_FOR_ITSELF
    detail = f"{hard_limit:,} per process, enough for about {free:,} client and upstream connections of a worker"
    if free < _FEW_FDS:
        return warning("file descriptors", detail, _MORE_FILES)
    return ok("file descriptors", detail)


def descriptors_for_upstreams(hard_limit: int, max_connections: int | None) -> Finding | None:
    """Refuse a `--max-connections` above the file descriptors, or return None if it fits or is left to the gateway."""
    if not max_connections or max_connections < hard_limit - _FDS_FOR_ITSELF:
        return None
    return failure(
        "file descriptors for upstreams",
        f"--max-connections {max_connections:,} does not fit into {hard_limit:,} file descriptors per process",
        _MORE_FILES + "; or lower --max-connections",
    )


def backlog(wanted: int, somaxconn: int | None) -> Finding:
    if somaxconn is None:
        return ok("listen backlog", f"{wanted:,}; the kernel does not report its limit")
    if wanted > somaxconn:
        return warning(
            "listen backlog",
            f"the kernel lowers --backlog {wanted:,} to {somaxconn:,} new connections that may queue for one worker",
            f"sysctl -w net.core.somaxconn={wanted}",
        )
    return ok("listen backlog", f"{wanted:,} new connections may queue for one worker")


def source_ip(address: str, refusal: str | None, connections: int) -> Finding:
    if refusal is not None:
        return failure(
            f"source IP {address}",
            f"cannot be bound: {refusal}",
            f"ip address add {address}/32 dev lo (or a network interface), or remove it from --source-ips",
        )
    return ok(f"source IP {address}", f"{connections:,} upstream connections for each worker on it")


def connections_per_worker(
    settings: Settings, ports: tuple[int, int], address_index: int = 0, open_files: int | None = None
) -> int:
    """Return what `--max-connections auto` allows a worker on this address; without a list all workers share one."""
    addresses = max(len(settings.source_ips), 1)
    sharing = len(range(address_index, settings.workers, addresses))
    return connection_limit(ports, len(settings.upstreams), sharing, open_files)


def connection_room(
    settings: Settings, ports: tuple[int, int], open_files: int | None = None, reserved: Sequence[range] = ()
) -> Finding:
    """Compare the upstream connections that are possible with the samples in flight.

    `open_files` is the hard limit of a process, `reserved` are the ports that no outgoing connection gets.
    """
    of_ports = _connections(settings, ports, None)
    wanted = settings.workers * settings.max_in_flight
    of_files = _connections(settings, ports, open_files)
    few_files = settings.max_connections is None and of_files < of_ports
    limit = f"{open_files:,} file descriptors per process" if few_files else f"ports {ports[0]}-{ports[1]}"
    total = of_files if few_files else of_ports
    detail = f"{total:,} at once, limited by {limit}, for up to {wanted:,} samples in flight"
    if settings.max_connections is not None:
        detail += f"; --max-connections is {settings.max_connections or '0, no limit'}"
        if settings.max_connections * settings.workers > of_ports:
            return warning(
                _CONNECTIONS,
                detail + ", more than the ports allow: the rest fail for lack of ports and are tried again",
                "leave --max-connections at auto, or " + _more_ports(settings, ports, reserved),
            )
        return ok(_CONNECTIONS, detail)
    if total >= wanted:
        return ok(_CONNECTIONS, detail)
    scarce = [_MORE_FILES] if few_files else []
    scarce += [_more_ports(settings, ports, reserved)] if of_ports < wanted else []
    return warning(_CONNECTIONS, detail + "; further samples wait", "\n".join(scarce))


def _connections(settings: Settings, ports: tuple[int, int], open_files: int | None) -> int:
    addresses = max(len(settings.source_ips), 1)
    return sum(
        connections_per_worker(settings, ports, slot % addresses, open_files) for slot in range(settings.workers)
    )


def _more_ports(settings: Settings, ports: tuple[int, int], reserved: Sequence[range]) -> str:
    if ports[0] <= _WIDEST[0] and ports[1] >= _WIDEST[1]:
        return "give more --source-ips"
    low, high = _WIDEST
    ours = [
        port for port in (settings.port, settings.admin_port) if port and not any(port in each for each in reserved)
    ]
    keep_ours = _reserve(ours, reserved) + " && " if ours else ""
    return f'{keep_ours}sysctl -w net.ipv4.ip_local_port_range="{low} {high}", or give more --source-ips'


def _reserve(ports: Sequence[int], reserved: Sequence[range]) -> str:
    """Write the command that reserves `ports`. It sets the whole list, so it repeats what is already reserved."""
    kept = [str(each.start) if len(each) == 1 else f"{each.start}-{each.stop - 1}" for each in reserved]
    return f"sysctl -w net.ipv4.ip_local_reserved_ports={','.join([*kept, *map(str, ports)])}"


def own_ports(taken: Sequence[int], ports: tuple[int, int], reserved: Sequence[range]) -> Finding | None:
    """Warn if an outgoing connection can get one of our own ports, otherwise return None."""
    low, high = ports
    clashes = [port for port in taken if low <= port <= high and not any(port in each for each in reserved)]
    if not clashes:
        return None
    named = ",".join(map(str, clashes))
    return warning(
        "own ports",
        f"an outgoing connection may get {named}; a restart then finds it in use",
        _reserve(clashes, reserved),
    )


def secret_file(path: str, mode: int) -> Finding:
    """Warn if others can use a file with keys; `mode` holds its permission bits."""
    if mode & 0o077:
        return warning(f"file {path}", f"mode {mode:04o}: others on this machine can use it", f"chmod 600 {path}")
    return ok(f"file {path}", f"mode {mode:04o}")


def clock_skew(skew_s: float) -> Finding:
    """Compare the clocks; `skew_s` is by how much Redis' clock is ahead of ours."""
    if abs(skew_s) > _MUCH_SKEW_S:
        return warning(
            "clocks",
            f"the clock of Redis differs by {skew_s:+.1f} s from this machine's;"
            " session time-outs use the clocks of all hosts",
            "let NTP (chrony, systemd-timesyncd) set both",
        )
    return ok("clocks", f"the clock of Redis differs by {skew_s:+z.1f} s from this machine's")


def redis(info: StoreInfo, where: str) -> list[Finding]:
    found = [ok("Redis", f"{where}: {info.mode}, {info.version}")]
    if (refusal := policy_refusal(info)) is not None:
        found.append(
            failure(
                "Redis eviction",
                refusal,
                "CONFIG SET maxmemory-policy noeviction, and set it in its configuration file",
            )
        )
    else:
        found.append(ok("Redis eviction", info.policy or "none"))
    return [*found, _redis_memory(info)]


def _redis_memory(info: StoreInfo) -> Finding:
    used = human_bytes(info.used_bytes)
    if info.max_bytes == 0:
        return warning(
            "Redis memory",
            f"{used} used, no limit: a full machine kills Redis, and all results with it",
            "CONFIG SET maxmemory to what the machine can spare; when it is full, new samples get 429",
        )
    detail = f"{used} of {human_bytes(info.max_bytes)} used"
    if info.max_bytes - info.used_bytes < _LITTLE_REDIS_MEMORY_BYTES:
        return warning("Redis memory", detail, "raise maxmemory; when it is full, new samples get 429")
    return ok("Redis memory", detail)


def models(upstream: str, offered: Sequence[OfferedModel]) -> Finding:
    listed = ", ".join(
        f"{model.name} (context {model.max_model_len or 'unknown'})" for model in offered if model.parent is None
    )
    if not listed:
        return failure(f"upstream {upstream}", "offers no base model", "start vLLM with a model")
    return ok(f"upstream {upstream}", listed)


def missing_models(
    wanted: Sequence[ModelName], offered: Mapping[str, Sequence[OfferedModel]], *, all_answered: bool
) -> list[Finding]:
    """Report each `--model` that no upstream offers. `offered` holds the models of the upstreams that answered."""
    names = {model.name for models in offered.values() for model in models}
    if not names:  # each upstream has its own failure
        return []
    has = "; ".join(f"{url} offers {', '.join(sorted(each.name for each in offered[url]))}" for url in offered)
    return [
        failure(f"--model {model.flag}", "no upstream offers it", has)
        if all_answered
        else warning(f"--model {model.flag}", "no upstream that answers offers it", has)
        for model in wanted
        if model.upstream_name not in names
    ]


def upstream_failure(upstream: str, reason: str, *, answered: bool) -> Finding:
    if answered:
        advice = "is this the base URL of a vLLM server or router, and does it want --upstream-api-key-file?"
    else:
        advice = "is it running, and reachable from this host and its source IPs?"
    return failure(f"upstream {upstream}", reason, advice)


def generations(upstream: str, choice: ProtocolChoice, status: int) -> Finding:
    """Say whether an upstream has the generate API, from its status for an empty generation."""
    subject = f"generations at {upstream}"
    found = has_generate(status)
    if found:
        return ok(subject, f"{UpstreamProtocol.GENERATE.path} is there")
    if found is None:
        return warning(subject, f"answered {status} to a probe", "try again; is the key right?")
    if choice is ProtocolChoice.AUTO:
        return ok(subject, f"none; {UpstreamProtocol.COMPLETIONS.path} is used")
    return failure(
        subject,
        f"answers {status}: there is no {UpstreamProtocol.GENERATE.path}",
        "start vLLM with --enable-scale-out, or give --upstream-protocol completions or auto",
    )


def training(url: str, status: int) -> Finding:
    """Judge a training server by its status for a request that every Tinker server knows."""
    subject = f"training server {url}"
    if status in (401, 403):
        advice = "give --training-api-key-file, or --training-forward-key if the clients' keys are its own"
        return warning(subject, f"answers {status}: it wants a key", advice)
    if status != 200:
        return failure(subject, f"answers {status}", "is this the base URL of a Tinker server, without /api/v1?")
    return ok(subject, "answers")


def training_failure(url: str, reason: str) -> Finding:
    return failure(f"training server {url}", reason, "is it running, and reachable from this host and its source IPs?")


def scaling(upstream: str, model: str, scales: bool | None) -> Finding:
    subject = f"logprobs of {model} at {upstream}"
    if scales is None:
        return warning(subject, "one token did not show whether they use the temperature", "try again with more load")
    if scales:
        return ok(subject, "use the temperature")
    return failure(
        subject,
        "ignore the temperature: the same at 0.5 and 1, so not those of the sampled distribution",
        "start vLLM with --logprobs-mode processed_logprobs",
    )


def libraries(missing: Sequence[str]) -> Finding:
    if missing:
        return failure("libraries", f"{', '.join(missing)} cannot be imported", "install the gateway again")
    return ok("libraries", "uvloop and httptools are installed")


def protobuf(implementation: str) -> Finding:
    if implementation != "upb":
        return warning(
            "protobuf",
            f"the {implementation} implementation is in use: encoding a result is many times slower",
            "unset PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION; install a protobuf wheel with upb",
        )
    return ok("protobuf", "the fast implementation (upb) is in use")


def access(settings: Settings) -> Finding:
    if settings.api_keys == ():
        return warning("API keys", "the keys file has no entry: all requests are refused", "gateway keys add NAME")
    if settings.api_keys is not None:
        return ok("API keys", f"{len(settings.api_keys)}: {', '.join(key.name for key in settings.api_keys[:8])}")
    if settings.allow_anonymous:
        return warning("API keys", "none: --allow-anonymous lets everybody in", "give --api-keys-file")
    return ok("API keys", "none are needed: only this machine can connect")
