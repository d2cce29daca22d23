from __future__ import annotations

import re
import tomllib
from hashlib import sha256

import pytest

from gateway.keys_file import new_entry, parse_keys
from shared.config import ApiKey
from shared.core.errors import ConfigError

DIGEST = "ab" * 32


def entry(name: str = "alice", digest: str = DIGEST) -> str:
    return f'[[keys]]\nname = "{name}"\nsha256 = "{digest}"\n'


def test_entries() -> None:
    text = entry() + entry("bob", "sha256:" + "CD" * 32)
    assert parse_keys(text, "keys.toml") == (ApiKey("alice", DIGEST), ApiKey("bob", "cd" * 32))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "keys.toml: there is no entry"),
        ("keys = 3", "keys.toml: there is no entry"),
        ("[[keys]]\nnonsense\n", "keys.toml: .*line 2"),
        (entry() + 'nmae = "x"', "keys.toml: entry 1: an entry is"),
        ("[[key]]\n" + entry(), "keys.toml: unknown key 'key'"),
        (entry() + '[[keys]]\nname = "x"', "keys.toml: entry 2: an entry is"),
        (entry(" "), "keys.toml: entry 1: name must be text"),
        (entry("bob", "tml-secret"), "keys.toml: entry 1 \\(bob\\): sha256 must be 64 hexadecimal digits"),
        (entry() + entry("bob"), "keys.toml: entry 2: sha256 abababab... is already in entry 1"),
        (entry() + entry(digest="cd" * 32), "keys.toml: entry 2: name 'alice' is already in entry 1"),
    ],
)
def test_refusals_name_the_entry(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refusal:
        parse_keys(text, "keys.toml")
    assert "tml-secret" not in str(refusal.value)


def test_a_new_entry_is_a_valid_one() -> None:
    text = new_entry("alice", "tml-k")
    assert parse_keys(text, "x") == (ApiKey("alice", sha256(b"tml-k").hexdigest()),)
    assert not re.search("tml-", text)
    assert tomllib.loads(text)["keys"][0]["name"] == "alice"
