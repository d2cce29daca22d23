"""`gateway new-key`: a key for a caller, and what the keys file needs to know of it."""

from __future__ import annotations

import secrets
from typing import Final

import click

from gateway.keys_file import new_entry

_RANDOM_BYTES: Final = 24  # 192 bits: past guessing, and still one line


@click.command()
@click.argument("name")
def new_key(name: str) -> None:
    """Make an API key for NAME.

    Prints the key, to be handed to the caller and kept nowhere else, and below it the entry for the file given with
    --api-keys-file. A running gateway reads that file again on SIGHUP.
    """
    if not name.strip() or '"' in name or "\\" in name or not name.isprintable():
        raise click.BadParameter("use printable text without quotes and backslashes", param_hint="NAME")
    key = "tml-" + secrets.token_urlsafe(_RANDOM_BYTES)
    click.echo(f"TINKER_API_KEY={key}\n", err=False)
    click.echo(new_entry(name, key), nl=False)
