"""`--api-keys-file`: the callers, by name and hash. The keys themselves are in no file of the gateway.

    [[keys]]
    name = "alice"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"   # of the whole key, tml-... included

`gateway new-key NAME` prints a key and its entry. Pure.
"""

from __future__ import annotations

import re
import tomllib
from hashlib import sha256
from typing import Any, Final

from shared.config import ApiKey
from shared.core.errors import ConfigError

_HEX_DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}")
_ENTRY: Final = 'an entry is [[keys]] with name = "..." and sha256 = "64 hexadecimal digits"'


def parse_keys(text: str, path: str) -> tuple[ApiKey, ...]:
    """The keys of a file. Raises `ConfigError` naming the file and the line or entry."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}; {_ENTRY}") from None
    entries = data.pop("keys", None)
    if data or not isinstance(entries, list) or not entries:
        what = f"unknown key {next(iter(data))!r}" if data else "there is no entry"
        raise ConfigError(f"{path}: {what}; {_ENTRY}")
    keys = tuple(_key(entry, f"{path}: entry {number}") for number, entry in enumerate(entries, 1))
    _refuse_duplicates(keys, path)
    return keys


def _key(entry: Any, where: str) -> ApiKey:
    if not isinstance(entry, dict) or set(entry) != {"name", "sha256"}:
        raise ConfigError(f"{where}: {_ENTRY}")
    name, digest = entry["name"], entry["sha256"]
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"{where}: name must be text that is not empty")
    digest = digest.removeprefix("sha256:") if isinstance(digest, str) else ""
    if not _HEX_DIGEST.fullmatch(digest):
        # Not repeated: somebody may have put the key itself here.
        raise ConfigError(f"{where} ({name}): sha256 must be 64 hexadecimal digits, the hash of the key")
    return ApiKey(name, digest.lower())


def _refuse_duplicates(keys: tuple[ApiKey, ...], path: str) -> None:
    seen: dict[str, int] = {}
    for number, key in enumerate(keys, 1):
        for value in (f"name {key.name!r}", f"sha256 {key.sha256[:8]}..."):
            if value in seen:
                raise ConfigError(f"{path}: entry {number}: {value} is already in entry {seen[value]}")
            seen[value] = number


def new_entry(name: str, key: str) -> str:
    """The TOML entry for a key."""
    return f'[[keys]]\nname = "{name}"\nsha256 = "{sha256(key.encode()).hexdigest()}"\n'
