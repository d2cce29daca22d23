"""`gateway check`: everything that serve would need, tried, and what to do about what is missing.

The findings are made by small functions from what was measured; the measuring is in `check_command.py`.
"""

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
    """`advice`: what to do; empty when all is well."""

    subject: str
    verdict: Verdict
    detail: str
    advice: str = ""


# Per worker: its listener, channel, Redis connections, libraries' own; the rest is for clients and upstreams.
_FDS_FOR_ITSELF: Final = 64
# A worker that cannot hold this many connections will not carry a usual rollout.
_FEW_FDS: Final = 4096
_CONNECTIONS: Final = "upstream connections"
_MORE_FILES: Final = (
    "raise the hard limit of file descriptors: ulimit -Hn, LimitNOFILE= of systemd, ulimits: of compose"
)
# As deploy/sysctl.conf has it.
_WIDEST: Final = (1024, 65535)
_LITTLE_REDIS_MEMORY_BYTES: Final = 256 << 20
# A reply may take its time; a session's silence is measured in minutes.
_MUCH_SKEW_S: Final = 5.0


def ok(subject: str, detail: str) -> Finding:
    return Finding(subject, Verdict.OK, detail)


def warning(subject: str, detail: str, advice: str) -> Finding:
    return Finding(subject, Verdict.WARNING, detail, advice)


def failure(subject: str, detail: str, advice: str) -> Finding:
    return Finding(subject, Verdict.FAILURE, detail, advice)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 when serve would not work."""
    return int(any(finding.verdict is Verdict.FAILURE for finding in findings))


def summary(findings: Sequence[Finding]) -> str:
    """How many of each verdict, in one line."""
    count = Counter(finding.verdict for finding in findings)
    return ", ".join(f"{count[verdict]} {verdict.value}" for verdict in Verdict)


def file_descriptors(hard_limit: int) -> Finding:
    free = hard_limit - _FDS_FOR_ITSELF
    detail = f"{hard_limit} per process: about {free} connections of clients and upstreams per worker"
    if free < _FEW_FDS:
        return warning("file descriptors", detail, _MORE_FILES)
    return ok("file descriptors", detail)


def descriptors_for_upstreams(hard_limit: int, max_connections: int | None) -> Finding | None:
    """None where `--max-connections` leaves it to the gateway."""
    if not max_connections or max_connections < hard_limit - _FDS_FOR_ITSELF:
        return None
    return failure(
        "file descriptors for upstreams",
        f"--max-connections {max_connections} does not fit into {hard_limit} file descriptors per process",
        _MORE_FILES + "; or lower --max-connections",
    )


def backlog(wanted: int, somaxconn: int | None) -> Finding:
    if somaxconn is None:
        return ok("listen backlog", f"{wanted}; the kernel does not tell its limit")
    if wanted > somaxconn:
        return warning(
            "listen backlog",
            f"--backlog {wanted} is cut to {somaxconn}: that many connections may queue for one worker",
            f"sysctl -w net.core.somaxconn={wanted}",
        )
    return ok("listen backlog", f"{wanted}")


def source_ip(address: str, refusal: str | None, connections: int) -> Finding:
    if refusal is not None:
        return failure(
            f"source IP {address}",
            f"cannot be bound: {refusal}",
            f"ip address add {address}/32 dev lo (or a network interface), or take it out of --source-ips",
        )
    return ok(f"source IP {address}", f"{connections} upstream connections for each worker on it")


def connections_per_worker(
    settings: Settings, ports: tuple[int, int], address_index: int = 0, open_files: int | None = None
) -> int:
    """What `--max-connections auto` gives the workers of the address; all workers share one when there is no list."""
    addresses = max(len(settings.source_ips), 1)
    sharing = len(range(address_index, settings.workers, addresses))
    return connection_limit(ports, len(settings.upstreams), sharing, open_files)


def connection_room(
    settings: Settings, ports: tuple[int, int], open_files: int | None = None, reserved: Sequence[range] = ()
) -> Finding:
    """`open_files`: the hard limit of a process; `reserved`: ports that no outgoing connection gets."""
    of_ports = _connections(settings, ports, None)
    wanted = settings.workers * settings.max_in_flight
    detail = f"{of_ports} at once from ports {ports[0]}-{ports[1]}, for at most {wanted} samples"
    if settings.max_connections is not None:
        detail += f"; --max-connections {settings.max_connections or 'none'} decides"
        if settings.max_connections * settings.workers > of_ports:
            return warning(
                _CONNECTIONS,
                detail
                + ", and there are not so many: connections above that fail for lack of ports, and are tried again",
                "leave --max-connections at auto, or " + _more_ports(settings, ports, reserved),
            )
        return ok(_CONNECTIONS, detail)
    total = _connections(settings, ports, open_files)
    if total < of_ports:
        detail = f"{total} at once, by {open_files} file descriptors per process, for at most {wanted} samples"
    if total >= wanted:
        return ok(_CONNECTIONS, detail)
    scarce = [_MORE_FILES] if total < of_ports else []
    scarce += [_more_ports(settings, ports, reserved)] if of_ports < wanted else []
    return warning(_CONNECTIONS, detail + "; samples above that wait", "; and ".join(scarce))


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
    """The list is set as a whole, so what is reserved already is in it."""
    kept = [str(each.start) if len(each) == 1 else f"{each.start}-{each.stop - 1}" for each in reserved]
    return f"sysctl -w net.ipv4.ip_local_reserved_ports={','.join([*kept, *map(str, ports)])}"


def own_ports(taken: Sequence[int], ports: tuple[int, int], reserved: Sequence[range]) -> Finding | None:
    """None when no outgoing connection can be given one of our own ports."""
    low, high = ports
    clashes = [port for port in taken if low <= port <= high and not any(port in each for each in reserved)]
    if not clashes:
        return None
    named = ",".join(map(str, clashes))
    return warning(
        "own ports",
        f"{named} may be given to an outgoing connection; a restart then finds it taken",
        _reserve(clashes, reserved),
    )


def secret_file(path: str, mode: int) -> Finding:
    """`mode`: the permission bits."""
    if mode & 0o077:
        return warning(f"file {path}", f"mode {mode:04o}: others on this machine can use it", f"chmod 600 {path}")
    return ok(f"file {path}", f"mode {mode:04o}")


def clock_skew(skew_s: float) -> Finding:
    """By how much Redis' clock is ahead of ours."""
    if abs(skew_s) > _MUCH_SKEW_S:
        return warning(
            "clocks",
            f"Redis' clock is {skew_s:+.1f} s from this machine's; sessions are judged by the clocks of all hosts",
            "let NTP (chrony, systemd-timesyncd) set both",
        )
    return ok("clocks", f"Redis' is {skew_s:+z.1f} s from this machine's")


def redis(info: StoreInfo, where: str) -> list[Finding]:
    found = [ok("Redis", f"{where}: {info.mode}, version {info.version}")]
    if (refusal := policy_refusal(info)) is not None:
        found.append(failure("Redis eviction", refusal, "CONFIG SET maxmemory-policy noeviction, and in its file"))
    else:
        found.append(ok("Redis eviction", info.policy or "none"))
    return [*found, _redis_memory(info)]


def _redis_memory(info: StoreInfo) -> Finding:
    used = human_bytes(info.used_bytes)
    if info.max_bytes == 0:
        return warning(
            "Redis memory",
            f"{used} used, no limit: a full machine kills Redis, and all results with it",
            "CONFIG SET maxmemory to what the machine can spare; new samples then get 429 when it is full",
        )
    detail = f"{used} of {human_bytes(info.max_bytes)} used"
    if info.max_bytes - info.used_bytes < _LITTLE_REDIS_MEMORY_BYTES:
        return warning("Redis memory", detail, "raise maxmemory; new samples get 429 when it is full")
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
    """`wanted`: of `--model`; one upstream that offers it is enough. `offered`: by upstream, of those that answered."""
    names = {model.name for models in offered.values() for model in models}
    if not names:  # each of them has its own failure
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
    """`status`: of the answer to a generation that lacks all."""
    subject = f"generations at {upstream}"
    found = has_generate(status)
    if found:
        return ok(subject, f"{UpstreamProtocol.GENERATE.path} is there")
    if found is None:
        return warning(subject, f"answered {status} to a question about them", "try again; is the key the right one?")
    if choice is ProtocolChoice.AUTO:
        return ok(subject, f"none, it is asked by {UpstreamProtocol.COMPLETIONS.path}")
    return failure(
        subject,
        f"answers {status}: there is no {UpstreamProtocol.GENERATE.path}",
        "start vLLM with --enable-scale-out, or give --upstream-protocol completions or auto",
    )


def training(url: str, status: int) -> Finding:
    """By how it answers a question that every Tinker server knows."""
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
        return warning(subject, "one token did not tell whether they heed the temperature", "try again with more load")
    if scales:
        return ok(subject, "heed the temperature")
    return failure(
        subject,
        "are raw: the same at temperature 0.5 and 1, so not those of the distribution sampled from",
        "start vLLM with --logprobs-mode processed_logprobs",
    )


def libraries(missing: Sequence[str]) -> Finding:
    if missing:
        return failure("libraries", f"{', '.join(missing)} cannot be imported", "install the gateway again")
    return ok("libraries", "uvloop and httptools are there")


def protobuf(implementation: str) -> Finding:
    if implementation != "upb":
        return warning(
            "protobuf",
            f"the {implementation} implementation is in use: encoding a result is many times slower",
            "unset PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION; install a protobuf wheel with upb",
        )
    return ok("protobuf", "upb")


def access(settings: Settings) -> Finding:
    if settings.api_keys == ():
        return warning("API keys", "the keys file has no entry: nobody gets in", "gateway keys add NAME")
    if settings.api_keys is not None:
        return ok("API keys", f"{len(settings.api_keys)}: {', '.join(key.name for key in settings.api_keys[:8])}")
    if settings.allow_anonymous:
        return warning("API keys", "none: --allow-anonymous lets anybody in", "give --api-keys-file")
    return ok("API keys", "none, and only this machine can connect")
