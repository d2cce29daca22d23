"""`gateway upstreams`: show and change the upstreams of a running gateway, for all workers of all hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gateway.commands.admin_client import admin_client, admin_options

if TYPE_CHECKING:
    from collections.abc import Mapping

_SOURCES = {"published": "published at run time", "flags": "set by the flags"}


@click.group()
def upstreams() -> None:
    """Show and change the upstreams of a running gateway.

    A new list reaches every worker of every host on the same Redis within a second. It replaces the --upstream flags
    until the next list is set. Samples at an upstream that is no longer listed run to their end.
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
    """Use these upstreams and no others from now on.

    \b
    Exit codes:  0 set      3 no gateway answers, or it refuses the list
    """
    reply = admin_client(admin, admin_key_file).ask("PUT", "/upstreams", list(urls))
    click.echo(f"published: {', '.join(reply['urls'])}")
    return 0


@upstreams.command("reset")
@admin_options
def reset(admin: str, admin_key_file: str | None) -> int:
    """Go back to the --upstream flags; each host uses its own."""
    reply = admin_client(admin, admin_key_file).ask("DELETE", "/upstreams")
    click.echo(f"set by the flags: {', '.join(reply['urls'])}")
    return 0


def _show(reply: Mapping[str, Any]) -> None:
    count = len(reply["urls"])
    click.echo(f"{count} {'upstream' if count == 1 else 'upstreams'}, {_SOURCES[reply['source']]}")
    for row in reply["upstreams"]:
        counts = f"{row['in_flight']} in flight, {row['failures']} failures in a row"
        click.echo(f"{row['url']}  {row['state']}  {counts}")
