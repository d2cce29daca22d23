"""`gateway check`: measures, and prints the table. `findings.py` decides what a measurement means."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gateway.commands import findings as checks
from gateway.machine import kernel
from gateway.settings.command_line import SettingsCommand, settings_from, settings_options
from gateway.supervision import listeners
from gateway.supervision.backing import redis_backing
from gateway.supervision.upstream_probe import (
    NoAnswer,
    ProbeError,
    generation_status,
    offered_models,
    probe_scaling,
    session,
    to_probe,
    training_status,
)
from shared.core.errors import StartError
from shared.core.upstream_protocol import ProtocolChoice

if TYPE_CHECKING:
    import aiohttp

    from gateway.commands.findings import Finding
    from gateway.supervision.upstream_probe import OfferedModel
    from shared.config import Settings


@click.command(cls=SettingsCommand)
@settings_options
def check(**values: Any) -> int:
    """Test everything that `gateway serve` needs with the same flags, and print a table.

    The command changes nothing and leaves nothing running. It samples a few single tokens from each upstream. Each line
    says ok, warning (the gateway would start, but read this) or failure (it would not start or not work), and what to
    do.

    \b
    Exit codes:  0 no failure    1 at least one failure    2 invalid configuration
    """
    files: list[str] = []
    settings = settings_from(dict(values), files.append)
    secret_files = [*files, *([settings.tls_key] if settings.tls_key else [])]
    permissions = [checks.secret_file(path, stat.S_IMODE(os.stat(path).st_mode)) for path in secret_files]
    findings = [*asyncio.run(all_findings(settings)), *permissions]
    _print(findings)
    return checks.exit_code(findings)


async def all_findings(settings: Settings) -> list[Finding]:
    return [
        *_machine(settings),
        *_sockets(settings),
        *_source_ips(settings),
        *await _redis(settings),
        *await _upstreams(settings),
        *await _training(settings),
        checks.access(settings),
    ]


def _machine(settings: Settings) -> list[Finding]:
    from google.protobuf.internal import api_implementation

    open_files = kernel.raise_fd_limit()
    return [
        checks.libraries(kernel.missing_libraries()),
        checks.protobuf(api_implementation.Type()),
        checks.file_descriptors(open_files),
        *_some(checks.descriptors_for_upstreams(open_files, settings.max_connections)),
        checks.backlog(settings.backlog, listeners.somaxconn()),
    ]


def _some(finding: Finding | None) -> list[Finding]:
    return [finding] if finding is not None else []


def _sockets(settings: Settings) -> list[Finding]:
    found = []
    for what, flags, host, port in (
        ("public address", "--", settings.host, settings.port),
        ("admin address", "--admin-", settings.admin_host, settings.admin_port),
    ):
        try:
            listeners.open_single(host, port, flags).close()
        except StartError as error:
            found.append(checks.failure(what, str(error), "a gateway that already runs holds these ports itself"))
        else:
            found.append(checks.ok(what, f"{host} port {port} is free" if port else f"{host}, any free port"))
    ours = [port for port in (settings.port, settings.admin_port) if port]
    return [*found, *_some(checks.own_ports(ours, kernel.ephemeral_ports(), kernel.reserved_ports()))]


def _source_ips(settings: Settings) -> list[Finding]:
    ports, open_files = kernel.ephemeral_ports(), kernel.raise_fd_limit()
    found = [
        checks.source_ip(
            address,
            kernel.source_ip_refusal(address),
            checks.connections_per_worker(settings, ports, index, open_files),
        )
        for index, address in enumerate(settings.source_ips)
    ]
    return [*found, checks.connection_room(settings, ports, open_files, kernel.reserved_ports())]


async def _redis(settings: Settings) -> list[Finding]:
    with tempfile.TemporaryDirectory(prefix="gateway-check-") as directory:
        backing = redis_backing(settings, Path(directory))
        try:
            await backing.open()
        except StartError as error:
            if backing.info is not None:  # it answers, but cannot be used as it is
                return checks.redis(backing.info, backing.description)
            return [
                checks.failure(
                    "Redis",
                    str(error),
                    "start it, or correct --redis-url; without that flag the gateway starts an embedded Redis",
                )
            ]
        try:
            info = backing.info
            if info is None:
                return []
            clocks = [checks.clock_skew(info.clock_us / 1e6 - time.time())] if info.clock_us else []
            return [*checks.redis(info, backing.description), *clocks]
        finally:
            await backing.close()


async def _upstreams(settings: Settings) -> list[Finding]:
    found: list[Finding] = []
    offered: dict[str, list[OfferedModel]] = {}
    async with session(settings.upstream_api_key) as http:
        for upstream in settings.upstreams:
            found += await _upstream(http, settings, upstream, offered)
    all_answered = len(offered) == len(settings.upstreams)
    return [*found, *checks.missing_models(settings.models, offered, all_answered=all_answered)]


async def _training(settings: Settings) -> list[Finding]:
    url = settings.training_upstream
    if url is None:
        return []
    async with session(None) as http:
        try:
            return [checks.training(url, await training_status(http, url, settings.training_api_key))]
        except NoAnswer as error:
            return [checks.training_failure(url, str(error))]


async def _upstream(
    http: aiohttp.ClientSession, settings: Settings, upstream: str, offered: dict[str, list[OfferedModel]]
) -> list[Finding]:
    """Return the findings about one upstream, and add its models to `offered`."""
    found: list[Finding] = []
    try:
        listed = offered[upstream] = await offered_models(http, upstream)
        found.append(checks.models(upstream, listed))
        if settings.upstream_protocol is not ProtocolChoice.COMPLETIONS:
            status = await generation_status(http, upstream)
            found.append(checks.generations(upstream, settings.upstream_protocol, status))
        for model in to_probe(listed, settings.models):
            scales = await probe_scaling(http, upstream, model)
            found.append(checks.scaling(upstream, model, scales))
    except ProbeError as error:
        found.append(checks.upstream_failure(upstream, str(error), answered=not isinstance(error, NoAnswer)))
    return found


_STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red"}


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a command that is cut off could not be copied
    for finding in findings:
        word = finding.verdict.value
        table.add_row(Text(word, _STYLES[word]), Text(f"{finding.subject}: {finding.detail}"))
        for advice in finding.advice.splitlines():  # on its own line, so that a command stays in one piece
            table.add_row("", Text(f"-> {advice}", "bold"))
    console = Console()
    console.print(table)
    console.print(checks.summary(findings))
