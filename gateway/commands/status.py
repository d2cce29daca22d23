"""`gateway status`: the `/status` of a running gateway as tables."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click
import orjson

from gateway.commands.admin_client import admin_client, admin_options
from gateway.settings.quantities import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import RenderableType
    from rich.table import Table

_WATCH_EVERY_S: Final = 1.0


@click.command()
@admin_options
@click.option("--json", "as_json", is_flag=True, help="Print the JSON of /status, for scripts.")
@click.option("--watch", is_flag=True, help="Refresh every second until Ctrl-C.")
def status(admin: str, admin_key_file: str | None, as_json: bool, watch: bool) -> int:
    """Show the workers, Redis, upstreams and samples of a running gateway.

    \b
    Exit codes:  0 shown      3 no gateway answers there
    """
    fetch = partial(admin_client(admin, admin_key_file).ask, "GET", "/status")
    if as_json:
        sys.stdout.write(orjson.dumps(fetch(), option=orjson.OPT_INDENT_2).decode() + "\n")
    elif watch:
        _watch(fetch)
    else:
        _show(fetch())
    return 0


def _show(report: Mapping[str, Any]) -> None:
    from rich.console import Console

    Console().print(tables(report))


def _watch(fetch: Callable[[], dict[str, Any]]) -> None:
    from rich.live import Live

    with Live(tables(fetch()), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(_WATCH_EVERY_S)
            live.update(tables(fetch()), refresh=True)


def tables(report: Mapping[str, Any]) -> RenderableType:
    """Return all of `/status` as tables for a terminal."""
    from rich.console import Group
    from rich.text import Text

    gateway, redis = report["gateway"], report["redis"]
    stopping = ", stopping" if gateway["stopping"] else ""
    limit = human_bytes(redis["max_bytes"]) if redis["max_bytes"] else "no limit"
    memory = f"{human_bytes(redis['used_bytes'])} of {limit}" if redis["reachable"] else "does not answer"
    place = "the embedded Redis" if redis["embedded"] else redis["url"]
    return Group(
        f"{gateway['url']}, version {gateway['version']}, since {gateway['started_at']}{stopping}",
        f"results in {place}: {redis['mode']} {redis['version']}, {memory}",
        *(Text(f"warning: {sentence}", style="yellow") for sentence in report["warnings"]),
        _table("workers", [_worker_row(worker) for worker in report["workers"]]),
        _table("upstreams", [_upstream_row(upstream) for upstream in report["upstreams"]]),
        _table("samples", [{"what": name.replace("_", " "), "count": n} for name, n in report["samples"].items()]),
        *([_table("keys", [_key_row(key) for key in report["keys"]])] if report["keys"] else ()),
        f"sessions: {report['sessions']}",
    )


def _worker_row(worker: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "slot": worker["slot"],
        "pid": worker["pid"],
        "state": worker["state"],
        "source IP": worker["source_ip"],
        "in flight": worker["in_flight"],
        "bytes": human_bytes(worker["in_flight_bytes"]),
        "restarts": worker["restarts"],
        "CPU s": f"{worker['cpu_seconds']:.1f}",
        "memory": human_bytes(worker["rss_bytes"]),
        "lag ms": f"{worker['loop_lag_ms_p99']:.1f}",
    }


def _upstream_row(upstream: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of an upstream. If it says `raw`, the operator has something to fix."""
    logprobs = {True: "use the temperature", False: "raw: see processed_logprobs", None: None}
    latency_s = upstream["latency_s"]
    return {
        "url": upstream["url"],
        "state": upstream["state"],
        "in flight": upstream["in_flight"],
        "failed": upstream["failed_attempts"],
        "p50 s": latency_s["p50"],
        "p99 s": latency_s["p99"],
        "logprobs": logprobs[upstream["logprobs_scale"]],
    }


def _key_row(key: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": key["name"],
        "in flight": key["in_flight"],
        "bytes": human_bytes(key["in_flight_bytes"]),
        "samples": key["samples"],
        "refused with 429": key["rejected"],
    }


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    # One space between columns, so that ten columns fit into 80 characters.
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in rows[0] if rows else ():
        table.add_column(name.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(Text("-" if value is None else str(value)) for value in row.values()))
    return table
