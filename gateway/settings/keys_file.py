"""The file of `--api-keys-file`: callers by name, with the hash and the limits of their key. Pure.

No file of the gateway holds the keys themselves.

    [[keys]]
    name = "alice"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"   # of the whole key, tml-... included
    max-in-flight = 2000
    max-in-flight-bytes = "256MiB"

`gateway keys` writes the file (`gateway/commands/keys.py`). A file without an entry lets nobody in.
"""

from __future__ import annotations

import re
import tomllib
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from gateway.settings.quantities import size_bytes, whole
from shared.core.callers import ApiKey, KeyLimits
from shared.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_HEX_DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}")
_HEADER: Final = re.compile(r"^[ \t]*\[\[[ \t]*keys[ \t]*\]\][ \t]*(?:#.*)?$", re.MULTILINE)
# A key with a limit of 0 could do nothing: revoke it instead.
_count: Final = whole(1, 1_000_000_000)
LIMITS: Final[Mapping[str, Callable[[str], int]]] = {
    "max-in-flight": _count,
    "max-in-flight-bytes": size_bytes(),
    "max-sessions": _count,
    "max-request-tokens": _count,
}
_ENTRY: Final = 'an entry is [[keys]] with name = "...", sha256 = "64 hexadecimal digits", and any of ' + ", ".join(
    LIMITS
)


def parse_keys(text: str, path: str) -> tuple[ApiKey, ...]:
    """Read the keys of a file. Raises `ConfigError` with the path and the line or entry."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also Python's own ValueError for an integer with too many digits
        raise ConfigError(f"{path}: {error}; {_ENTRY}") from None
    entries = data.pop("keys", [])
    if data or not isinstance(entries, list):
        what = f"unknown key {next(iter(data))!r}" if data else "keys is not a list of entries"
        raise ConfigError(f"{path}: {what}; {_ENTRY}")
    keys = tuple(_key(entry, f"{path}: entry {number}") for number, entry in enumerate(entries, 1))
    seen: dict[str, int] = {}
    for number, key in enumerate(keys, 1):
        for value in (f"name {key.name!r}", f"sha256 {key.sha256[:8]}..."):
            if value in seen:
                raise ConfigError(f"{path}: entry {number}: {value} is already in entry {seen[value]}")
            seen[value] = number
    return keys


def _key(entry: Any, where: str) -> ApiKey:
    if not isinstance(entry, dict) or not {"name", "sha256"} <= set(entry) <= {"name", "sha256", *LIMITS}:
        raise ConfigError(f"{where}: {_ENTRY}")
    name, digest = entry["name"], entry["sha256"]
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ConfigError(f"{where}: name must be printable text that is not empty")
    digest = digest.removeprefix("sha256:") if isinstance(digest, str) else ""
    if not _HEX_DIGEST.fullmatch(digest):
        # The message does not repeat the value: somebody may have put the key itself here.
        raise ConfigError(f"{where} ({name}): sha256 must be 64 hexadecimal digits, the hash of the key")
    given = {limit: value for limit, value in entry.items() if limit in LIMITS}
    return ApiKey(name, digest.lower(), parse_limits(given, f"{where} ({name})"))


def parse_limits(given: Mapping[str, Any], where: str) -> KeyLimits:
    """Read limits, given by their names in the file. Raises `ConfigError` with the name of the limit."""
    values: dict[str, int] = {}
    for limit, value in given.items():
        # TOML's integers have 64 bits. Python refuses to write a much longer one in decimal.
        if isinstance(value, int) and value.bit_length() > 64:
            raise ConfigError(f"{where}: {limit}: the number is too large")
        try:
            values[limit.replace("-", "_")] = LIMITS[limit](value if isinstance(value, str) else repr(value))
        except ValueError as error:
            raise ConfigError(f"{where}: {limit}: {value!r} is not allowed; {error}") from None
    return KeyLimits(**values)


def limits_of(limits: KeyLimits) -> dict[str, int]:
    """Return the limits that are set, by their names in the file."""
    found = {limit: getattr(limits, limit.replace("-", "_")) for limit in LIMITS}
    return {limit: value for limit, value in found.items() if value is not None}


def new_entry(name: str, key: str, limits: KeyLimits) -> str:
    """Write the TOML entry of a key. `name` must hold no quotes, backslashes or control characters."""
    lines = ["[[keys]]", f'name = "{name}"', f'sha256 = "{sha256(key.encode()).hexdigest()}"']
    lines += [f"{limit} = {value}" for limit, value in limits_of(limits).items()]
    return "\n".join(lines) + "\n"


def with_entry(text: str, entry: str, path: str) -> str:
    """Return the file with one more entry. Raises `ConfigError` if the name is taken."""
    taken = [key.name for key in parse_keys(text, path)]
    name = parse_keys(entry, path)[0].name
    if name in taken:
        raise ConfigError(f"{path}: there is already a key named {name!r}; revoke it first, or choose another name")
    extended = f"{text.rstrip()}\n\n{entry}" if text.strip() else entry
    parse_keys(extended, path)
    return extended


def without_entry(text: str, name: str, path: str) -> str:
    """Return the file without the entry of that name; all other text is kept. Raises `ConfigError`."""
    keys = parse_keys(text, path)
    names = [key.name for key in keys]
    if name not in names:
        raise ConfigError(f"{path}: there is no key named {name!r}; there are {', '.join(names) or 'none'}")
    at = names.index(name)
    headers = [match.start() for match in _HEADER.finditer(text)]
    if len(headers) == len(keys):
        shortened = text[: headers[at]] + text[([*headers, len(text)])[at + 1] :]
        if parse_keys(shortened, path) == keys[:at] + keys[at + 1 :]:
            return shortened
    raise ConfigError(f"{path}: the file is not a plain list of [[keys]] tables; remove the entry of {name!r} by hand")
