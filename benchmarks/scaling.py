"""Compute from one report of `gateway bench` what larger installations can do, and what saturates first.

    python benchmarks/scaling.py report.json [--workers 16 64] [--shards 6] [--in-flight 1000000] [--seconds 60]

This is arithmetic only. A sample has a measured cost; a resource has a capacity per second or at once; the resource
with the smallest quotient saturates first. The time that a sample takes relates the two kinds of limits: in flight =
rate x seconds. Every assumption that is not in the report is an option, and is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.tables import markdown, say
from shared.core.ports import DEFAULT_RANGE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Report = Mapping[str, Any]

MIB = 1024 * 1024
GIB = 1024 * MIB
# The memory of an idle worker: interpreter, libraries, application.
BASE_BYTES = 64.0 * MIB


@dataclass(frozen=True, slots=True)
class Costs:
    """The measured costs of one sample. Bytes are those of a wire's busier direction, since links carry both at once.

    `memory_bytes` is a worker's memory while the sample is in flight, `kept_bytes` that of Redis while the result is
    kept, and `connections` the workers' file descriptors while it is in flight.
    """

    worker_cpu_s: float
    redis_cpu_s: float
    redis_commands: float
    client_bytes: float
    upstream_bytes: float
    redis_bytes: float
    memory_bytes: float
    kept_bytes: float
    connections: float


@dataclass(frozen=True, slots=True)
class Site:
    """An installation. `shards` is the number of masters of a Redis cluster; 1 is a single server.

    `cluster_factor` is Redis's CPU per sample on a cluster relative to one server. `utilisation` is the share of a
    core, a link or a memory at which it counts as full. Each worker has its own core and source IP.
    """

    workers: int
    shards: int = 1
    cluster_factor: float = 2.0
    utilisation: float = 0.7
    link_bytes_s: float = 10e9 / 8
    hosts: int = 1
    upstream_addresses: int = 1
    open_files: int = 1_048_576
    ports: int = DEFAULT_RANGE[1] - DEFAULT_RANGE[0] + 1
    in_flight_limit: int = 65_536
    worker_memory_bytes: float = 4.0 * GIB
    base_bytes: float = BASE_BYTES

    def redis_cpu_s(self, costs: Costs) -> float:
        """Return Redis's CPU per sample, of all servers together."""
        return costs.redis_cpu_s * (self.cluster_factor if self.shards > 1 else 1.0)


@dataclass(frozen=True, slots=True)
class Limit:
    """The samples per second, or in flight, that `resource` allows."""

    resource: str
    samples: float


def costs_of(report: Report, base_bytes: float = BASE_BYTES) -> Costs:
    """Read the costs from a report. Raises `ValueError` if one is missing. `base_bytes`: memory of an idle worker."""
    samples = _of(report, "samples", "completed")
    in_flight = _of(report, "config", "concurrency")
    workers = _of(report, "gateway", "workers")
    return Costs(
        worker_cpu_s=_of(report, "gateway", "cpu_seconds") / samples,
        redis_cpu_s=_of(report, "redis", "cpu_seconds") / samples,
        redis_commands=_of(report, "redis", "commands_per_sample"),
        client_bytes=_busier(report, "client") / samples,
        upstream_bytes=_busier(report, "upstream") / samples,
        redis_bytes=_busier(report, "redis") / samples,
        memory_bytes=max(0.0, _of(report, "gateway", "peak_rss_bytes") - workers * base_bytes) / in_flight,
        kept_bytes=_of(report, "redis", "peak_bytes") / samples,
        connections=_of(report, "gateway", "peak_fds") / in_flight,
    )


def _of(report: Report, *names: str) -> float:
    value: Any = report
    for name in names:
        value = (value or {}).get(name)
    if not value:
        raise ValueError(f"the report has no {'.'.join(names)}; scaling needs a run in which bench started the gateway")
    return float(value)


def _busier(report: Report, wire: str) -> float:
    return max(_of(report, "wires", wire, name) for name in ("received_bytes", "sent_bytes"))


def rate_limits(costs: Costs, site: Site) -> list[Limit]:
    """Return the limits in samples per second, the lowest first. Redis runs commands on one core per server."""
    available = site.utilisation
    link = site.link_bytes_s * available
    limits = [
        Limit("CPU of the workers", site.workers * available / costs.worker_cpu_s),
        Limit("CPU of Redis", site.shards * available / site.redis_cpu_s(costs)),
        Limit("network to the clients", site.hosts * link / costs.client_bytes),
        Limit("network to the upstreams", site.hosts * link / costs.upstream_bytes),
        Limit("network of Redis", site.shards * link / costs.redis_bytes),
    ]
    return sorted(limits, key=lambda limit: limit.samples)


def in_flight_limits(costs: Costs, site: Site) -> list[Limit]:
    """Return the limits in samples in flight at once, the lowest first."""
    memory_bytes = site.worker_memory_bytes * site.utilisation - site.base_bytes
    limits = [
        Limit("--max-in-flight", site.workers * site.in_flight_limit),
        Limit("memory of the workers", site.workers * memory_bytes / max(costs.memory_bytes, 1.0)),
        Limit("open files of the workers", site.workers * site.open_files * site.utilisation / costs.connections),
        Limit("ports of the source IPs", site.workers * site.ports * site.upstream_addresses),
    ]
    return sorted(limits, key=lambda limit: limit.samples)


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources for `in_flight` samples that take `seconds` each. Bytes per second are those of all links."""

    in_flight: int
    seconds: float
    rate: float
    workers: int
    workers_because: str
    shards: int
    source_ips_per_upstream: int
    memory_bytes: float
    redis_memory_bytes: float
    client_bytes_s: float
    upstream_bytes_s: float
    redis_bytes_s: float


def needs(costs: Costs, site: Site, in_flight: int, seconds: float, kept_s: float) -> Needs:
    """Compute the resources; the numbers of workers and shards of `site` are ignored. Redis keeps results `kept_s`."""
    rate = in_flight / seconds
    one = replace(site, workers=1)
    wanted = {limit.resource: in_flight / limit.samples for limit in in_flight_limits(costs, one)}
    wanted["CPU of the workers"] = rate * costs.worker_cpu_s / site.utilisation
    because = max(wanted, key=lambda resource: wanted[resource])
    workers = max(1, math.ceil(wanted[because]))
    return Needs(
        in_flight=in_flight,
        seconds=seconds,
        rate=rate,
        workers=workers,
        workers_because=because,
        shards=shards_for(costs, site, rate),
        source_ips_per_upstream=math.ceil(in_flight / site.ports),
        memory_bytes=workers * site.base_bytes + in_flight * costs.memory_bytes,
        redis_memory_bytes=rate * kept_s * costs.kept_bytes,
        client_bytes_s=rate * costs.client_bytes,
        upstream_bytes_s=rate * costs.upstream_bytes,
        redis_bytes_s=rate * costs.redis_bytes,
    )


def shards_for(costs: Costs, site: Site, rate: float) -> int:
    """Return the number of Redis masters for this rate: one, or those of a cluster, which has at least three."""
    if rate * costs.redis_cpu_s <= site.utilisation:
        return 1
    return max(3, math.ceil(rate * costs.redis_cpu_s * site.cluster_factor / site.utilisation))


# -- for people


def costs_table(costs: Costs) -> str:
    rows = [
        ("CPU of the workers", f"{costs.worker_cpu_s * 1e3:.3f} ms"),
        ("CPU of Redis", f"{costs.redis_cpu_s * 1e6:.0f} us"),
        ("Redis commands", f"{costs.redis_commands:.1f}"),
        ("bytes to or from the client, the larger", f"{costs.client_bytes:,.0f}"),
        ("bytes to or from the upstream, the larger", f"{costs.upstream_bytes:,.0f}"),
        ("bytes to or from Redis, the larger", f"{costs.redis_bytes:,.0f}"),
        ("memory of a worker while in flight", f"{costs.memory_bytes / 1024:.1f} KiB"),
        ("memory of Redis while kept", f"{costs.kept_bytes:,.0f} bytes"),
        ("descriptors of workers while in flight", f"{costs.connections:.2f}"),
    ]
    return markdown(("a sample costs", "measured"), rows)


def sites_table(costs: Costs, sites: Sequence[Site]) -> str:
    header = ("workers", "Redis", "saturates first", "samples/s", "then", "in flight, at most", "because of")
    return markdown(header, [_site_row(costs, site) for site in sites])


def _site_row(costs: Costs, site: Site) -> list[str]:
    first, second = rate_limits(costs, site)[:2]
    most = in_flight_limits(costs, site)[0]
    redis = "one server" if site.shards == 1 else f"{site.shards} masters"
    then = f"{second.resource}, {second.samples:,.0f}/s"
    return [
        str(site.workers),
        redis,
        first.resource,
        f"{first.samples:,.0f}",
        then,
        f"{most.samples:,.0f}",
        most.resource,
    ]


def needs_table(found: Sequence[Needs]) -> str:
    header = ("in flight", "each takes", "samples/s", "workers", "because of", "Redis masters", "memory of workers")
    more = ("memory of Redis", "to clients", "to upstreams", "source IPs per upstream address")
    return markdown((*header, *more), [_needs_row(need) for need in found])


def _needs_row(need: Needs) -> list[str]:
    return [
        f"{need.in_flight:,}",
        f"{need.seconds:g} s",
        f"{need.rate:,.0f}",
        str(need.workers),
        need.workers_because,
        str(need.shards),
        f"{need.memory_bytes / GIB:.1f} GiB",
        f"{need.redis_memory_bytes / GIB:.1f} GiB",
        f"{need.client_bytes_s / 1e6:,.0f} MB/s",
        f"{need.upstream_bytes_s / 1e6:,.0f} MB/s",
        str(need.source_ips_per_upstream),
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="the file that `gateway bench --json` wrote, without --url")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 16, 64])
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 6], help="masters of Redis; 1 is a single server")
    parser.add_argument("--workers-per-host", type=int, default=16)
    parser.add_argument("--cluster-factor", type=float, default=2.0, help="Redis' CPU on a cluster over one server's")
    parser.add_argument("--utilisation", type=float, default=0.7)
    parser.add_argument(
        "--link-gbit", type=float, default=10.0, help="network of each gateway host and each Redis server"
    )
    parser.add_argument("--upstream-addresses", type=int, default=1)
    parser.add_argument("--open-files", type=int, default=1_048_576, help="limit of open files of each worker")
    parser.add_argument("--worker-memory-gib", type=float, default=4.0)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[131_072, 1_000_000])
    parser.add_argument("--seconds", type=float, nargs="+", default=[30.0, 120.0], help="duration of a sample")
    parser.add_argument("--kept-seconds", type=float, default=330.0, help="how long Redis keeps a result")
    return parser.parse_args(arguments)


def site_of(options: argparse.Namespace, workers: int, shards: int) -> Site:
    return Site(
        workers=workers,
        shards=shards,
        cluster_factor=options.cluster_factor,
        utilisation=options.utilisation,
        link_bytes_s=options.link_gbit * 1e9 / 8,
        hosts=math.ceil(workers / options.workers_per_host),
        upstream_addresses=options.upstream_addresses,
        open_files=options.open_files,
        worker_memory_bytes=options.worker_memory_gib * GIB,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        costs = costs_of(json.loads(options.report.read_text()))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{options.report}: {error}\n")
        return 2
    sites = [site_of(options, workers, shards) for workers in options.workers for shards in options.shards]
    found = [
        needs(costs, sites[0], in_flight, seconds, options.kept_seconds)
        for in_flight in options.in_flight
        for seconds in options.seconds
    ]
    say("\n\n".join([costs_table(costs), sites_table(costs, sites), needs_table(found), assumptions(options)]))
    return 0


def assumptions(options: argparse.Namespace) -> str:
    flags = [f"--{name.replace('_', '-')} {_shown(value)}" for name, value in vars(options).items() if name != "report"]
    return "Assumed: " + ", ".join(flags)


def _shown(value: Any) -> str:
    parts = value if isinstance(value, list) else [value]
    return " ".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts)


if __name__ == "__main__":
    sys.exit(main())
