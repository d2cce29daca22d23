"""`gateway keys`: who may come in, kept in the file of `--api-keys-file`."""

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

_RANDOM_BYTES: Final = 24  # 192 bits: past guessing, and still one line
_APPLY: Final = "A running gateway takes it over on SIGHUP, or on POST /reload at its admin address."

_file: Final = click.option(
    "--api-keys-file",
    "path",
    required=True,
    envvar=BY_KEY["api_keys_file"].variable,
    show_envvar=True,
    metavar="PATH",
    help="The file of keys, the same that serve is given.",
)


def _limits(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each limit that an entry may have."""
    texts = {
        "max-in-flight": "Samples in flight on this gateway.",
        "max-in-flight-bytes": "What its samples in flight hold in memory, such as 256MiB.",
        "max-sessions": "Sessions at a time.",
        "max-request-tokens": "num_samples x max_tokens of one request.",
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
    """Make an API key for NAME, enter it into the file, and print it.

    The key is printed this once: the file holds its hash only. Without a limit the key may take what the gateway
    takes.
    """
    entry, key = _made(name, given)
    with _edited(path) as edit:
        edit(lambda text: with_entry(text, entry, path))
    _print_key(key)
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
    """Take NAME's entry out of the file.

    After the reload its key is answered with 401, and what it had running is ended.
    """
    with _edited(path) as edit:
        edit(lambda text: without_entry(text, name, path))
    click.echo(f"{name} is no longer in {path}. {_APPLY}", err=True)


@click.command()
@click.argument("name")
@_limits
def new_key(name: str, **given: str | None) -> None:
    """Make an API key for NAME and print its entry, for a keys file that is written by other means.

    Prints the key, to be handed to the caller and kept nowhere else, and below it the entry for the file given with
    --api-keys-file. `gateway keys add` does the same and writes the file.
    """
    entry, key = _made(name, given)
    _print_key(key)
    click.echo(f"\n{entry}", nl=False)


def _made(name: str, given: dict[str, str | None]) -> tuple[str, str]:
    """A new key's entry, and the key."""
    if not name.strip() or '"' in name or "\\" in name or not name.isprintable():
        raise click.BadParameter("use printable text without quotes and backslashes", param_hint="NAME")
    limits = parse_limits({limit.replace("_", "-"): text for limit, text in given.items() if text is not None}, name)
    key = "tml-" + secrets.token_urlsafe(_RANDOM_BYTES)
    return new_entry(name, key, limits), key


def _print_key(key: str) -> None:
    click.echo(f"TINKER_API_KEY={key}")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, error) from None


@contextmanager
def _edited(path: str) -> Iterator[Callable[[Callable[[str], str]], None]]:
    """Change the file's text as a whole, one command at a time. Raises `ConfigError`."""
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
    """The old text or the new one, whenever it is read, and readable by its owner alone."""
    descriptor, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
            with suppress(FileNotFoundError):
                # A gateway that runs as somebody else goes on reading it.
                owner = target.stat()
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
        os.replace(draft, target)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _unusable(path: str, error: OSError | UnicodeDecodeError) -> ConfigError:
    reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
    return ConfigError(f"--api-keys-file: {path!r} cannot be used: {reason}")
