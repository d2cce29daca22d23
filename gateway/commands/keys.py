"""`gateway keys` and `gateway new-key`: the API keys in the file of `--api-keys-file`."""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gateway.settings.keys_file import LIMITS, limits_of, new_entry, parse_keys, parse_limits, with_entry, without_entry
from gateway.settings.table import BY_KEY
from shared.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_RANDOM_BYTES: Final = 24  # 192 bits: impossible to guess, and still one line
_APPLY: Final = "A running gateway reads the file again on SIGHUP, or on POST /reload at its admin address."

_file: Final = click.option(
    "--api-keys-file",
    "path",
    required=True,
    envvar=BY_KEY["api_keys_file"].variable,
    show_envvar=True,
    metavar="PATH",
    help="File of keys, the same as for serve.",
)


def _limits(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each limit that an entry may have."""
    texts = {
        "max-in-flight": "Most samples in flight on this gateway.",
        "max-in-flight-bytes": "Most memory for its samples in flight, such as 256MiB.",
        "max-sessions": "Most sessions at the same time.",
        "max-request-tokens": "Largest num_samples x max_tokens of one request.",
    }
    for limit in reversed(tuple(LIMITS)):
        command = click.option(f"--{limit}", metavar="N", help=texts[limit])(command)
    return command


@click.group(help=f"Add, list and revoke API keys. {_APPLY}")
def keys() -> None:
    pass


@keys.command()
@click.argument("name")
@_file
@_limits
def add(name: str, path: str, **given: str | None) -> None:
    """Make an API key for NAME, add it to the file, and print it.

    The key is printed only this once: the file holds only its hash. A limit that is not given is that of the gateway.
    """
    entry, key = _new_key(name, given)
    with _edited(path) as edit:
        edit(lambda text: with_entry(text, entry, path))
    click.echo(f"TINKER_API_KEY={key}")
    click.echo(f"{name} is in {path}. {_APPLY}", err=True)


@keys.command("list")
@_file
def list_(path: str) -> None:
    """Print each key's name, the beginning of its hash, and its limits."""
    for key in parse_keys(_read(path), path):
        limits = " ".join(f"{limit}={value}" for limit, value in limits_of(key.limits).items())
        click.echo(f"{key.name}  sha256 {key.sha256[:8]}  {limits or 'no limits'}")


@keys.command()
@click.argument("name")
@_file
def revoke(name: str, path: str) -> None:
    """Remove the entry of NAME from the file.

    After the reload its key gets 401, and its running samples end.
    """
    with _edited(path) as edit:
        edit(lambda text: without_entry(text, name, path))
    click.echo(f"{name} is no longer in {path}. {_APPLY}", err=True)


@click.command()
@click.argument("name")
@_limits
def new_key(name: str, **given: str | None) -> None:
    """Make an API key for NAME and print its entry, for a keys file that something else writes.

    Prints the key, which only the caller should keep, and below it the entry for the file of --api-keys-file. `gateway
    keys add` does the same and writes the file.
    """
    entry, key = _new_key(name, given)
    click.echo(f"TINKER_API_KEY={key}")
    click.echo(f"\n{entry}", nl=False)


def _new_key(name: str, given: dict[str, str | None]) -> tuple[str, str]:
    """Make a key, and return its entry and the key."""
    if not name.strip() or '"' in name or "\\" in name or not name.isprintable():
        raise click.BadParameter("use printable text without quotes and backslashes", param_hint="NAME")
    limits = parse_limits({limit.replace("_", "-"): text for limit, text in given.items() if text is not None}, name)
    key = "tml-" + secrets.token_urlsafe(_RANDOM_BYTES)
    return new_entry(name, key, limits), key


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, error) from None


@contextmanager
def _edited(path: str) -> Iterator[Callable[[Callable[[str], str]], None]]:
    """Yield a function that changes the file's text, while no other command does. Raises `ConfigError`."""
    target = Path(os.path.realpath(path))  # the file behind a link, not the link
    try:
        directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _unusable(path, error) from None
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield lambda change: _replace(target, change(_read(path) if target.exists() else ""))
    except OSError as error:
        raise _unusable(path, error) from None
    finally:
        os.close(directory)


def _replace(target: Path, text: str) -> None:
    """Replace the file at once, so that a reader sees the old text or the new one; only its owner can read it."""
    descriptor, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
            with suppress(FileNotFoundError):
                # A gateway that runs as another user can still read it.
                owner = target.stat()
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
        os.replace(draft, target)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _unusable(path: str, error: OSError | UnicodeDecodeError) -> ConfigError:
    reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
    return ConfigError(f"--api-keys-file: {path!r} cannot be used: {reason}")
