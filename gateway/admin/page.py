"""The status page at `/`: `/status` as tables, refreshed by the browser, without scripts."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, Final

from gateway.quantities import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_HEAD: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<title>sampling gateway</title><style>
body{font:14px/1.5 system-ui,sans-serif;margin:2rem;color:#222}table{border-collapse:collapse;margin:0 0 1.5rem}
th,td{text-align:left;padding:.2rem 1rem .2rem 0;border-bottom:1px solid #ddd;font-variant-numeric:tabular-nums}
</style></head><body>"""


def page(status: Mapping[str, Any]) -> str:
    """HTML for the JSON of `/status`."""
    gateway = status["gateway"]
    return "".join(
        (
            _HEAD,
            f"<h1>{escape(gateway['url'])}</h1>",
            f"<p>version {escape(gateway['version'])}, up since {gateway['started_at']}</p>",
            _table("Workers", status["workers"]),
            _table("Upstreams", status["upstreams"]),
            _table("Redis", [status["redis"]]),
            _table("Samples", [status["samples"]]),
            "</body></html>",
        )
    )


def _table(title: str, rows: Iterable[Mapping[str, Any]]) -> str:
    rows = list(rows)
    if not rows:
        return f"<h2>{title}</h2><p>none</p>"
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in rows[0])
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return f"<h2>{title}</h2><table><tr>{head}</tr>{body}</table>"


def _cells(row: Mapping[str, Any]) -> str:
    return "".join(f"<td>{escape(_cell(name, value))}</td>" for name, value in row.items())


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes"):
        return human_bytes(value)
    # A pid is copied into other commands, which know no thousands separator.
    return f"{value:,}" if isinstance(value, int) and name != "pid" else str(value)
