"""`gateway upstreams`: see and change the upstreams of a running gateway, on every worker of every host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gateway.commands.admin_client import admin_client, admin_options

if TYPE_CHECKING:
    from collections.abc import Mapping

_SOURCES = {"published": "published at run time", "flags": "those of the flags"}


@click.group()
def upstreams() -> None:
    """See and change the upstreams of a running gateway.

    A list that is set reaches every worker of every host on the same Redis within a second, and counts in place of the
    --upstream flags until another one is set. Samples at an upstream that is not on it any more run to their end.
    """


@upstreams.command("list")
@admin_options
def list_(admin: str, admin_key_file: str | None) -> int:
    """Show the upstreams, their state, and where the list comes from."""
    _show(admin_client(admin, admin_key_file).ask("GET", "/upstreams"))
    return 0


@upstreams.command("set")
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@admin_options
def set_(urls: tuple[str, ...], admin: str, admin_key_file: str | None) -> int:
    """Use these upstreams from now on, and no other.

    \b
    Exit codes:  0 set      3 no gateway answers there, or it refuses the list
    """
    told = admin_client(admin, admin_key_file).ask("PUT", "/upstreams", list(urls))
    click.echo(f"published: {', '.join(told['urls'])}")
    return 0


@upstreams.command("reset")
@admin_options
def reset(admin: str, admin_key_file: str | None) -> int:
    """Go back to the --upstream flags, each host to its own."""
    told = admin_client(admin, admin_key_file).ask("DELETE", "/upstreams")
    click.echo(f"those of the flags: {', '.join(told['urls'])}")
    return 0


def _show(told: Mapping[str, Any]) -> None:
    count = len(told["urls"])
    click.echo(f"{count} {'upstream' if count == 1 else 'upstreams'}, {_SOURCES[told['source']]}")
    for row in told["upstreams"]:
        counts = f"{row['in_flight']} in flight, {row['failures']} failures"
        click.echo(f"{row['url']}  {row['state']}  {counts}")
