from __future__ import annotations

import re
import tomllib
from hashlib import sha256

import pytest

from gateway.settings.keys_file import limits_of, new_entry, parse_keys, with_entry, without_entry
from shared.core.callers import NO_LIMITS, ApiKey, KeyLimits
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
        ("keys = 3", "keys.toml: keys is not a list of entries"),
        ("[[keys]]\nnonsense\n", "keys.toml: .*line 2"),
        # Found by the fuzzer: the library's parser has no bound of its own.
        ("[[keys]]\nname = " + "[" * 5000, "^keys.toml: "),
        (entry() + 'nmae = "x"', "keys.toml: entry 1: an entry is"),
        ("[[key]]\n" + entry(), "keys.toml: unknown key 'key'"),
        (entry() + '[[keys]]\nname = "x"', "keys.toml: entry 2: an entry is"),
        (entry(" "), "keys.toml: entry 1: name must be printable text"),
        (entry("bob", "tml-secret"), "keys.toml: entry 1 \\(bob\\): sha256 must be 64 hexadecimal digits"),
        (
            entry() + "max-sessions = 0",
            r"entry 1 \(alice\): max-sessions: 0 is not allowed; give a whole number from 1",
        ),
        (entry() + "max-in-flight = true", r"max-in-flight: True is not allowed"),
        (entry() + 'max-in-flight-bytes = "1 parsec"', "max-in-flight-bytes: '1 parsec' is not allowed; give a size"),
        (entry() + entry("bob"), "keys.toml: entry 2: sha256 abababab... is already in entry 1"),
        (entry() + entry(digest="cd" * 32), "keys.toml: entry 2: name 'alice' is already in entry 1"),
    ],
)
def test_refusals_name_the_entry(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refusal:
        parse_keys(text, "keys.toml")
    assert "tml-secret" not in str(refusal.value)


def test_a_file_without_an_entry_lets_nobody_in() -> None:
    """Not the same as no file: revoking the last key must not open the gateway."""
    assert parse_keys("# nobody yet\n", "x") == ()


def test_limits() -> None:
    text = entry() + 'max-in-flight = 5\nmax-in-flight-bytes = "2MiB"\nmax-sessions = 3\nmax-request-tokens = 4096\n'
    (key,) = parse_keys(text, "x")
    wanted = KeyLimits(max_in_flight=5, max_in_flight_bytes=2 << 20, max_sessions=3, max_request_tokens=4096)
    assert key.limits == wanted
    assert parse_keys(new_entry("alice", "k", wanted), "x")[0].limits == wanted
    assert limits_of(wanted)["max-sessions"] == 3


def test_entries_come_and_go_one_at_a_time() -> None:
    text = "# ours\n" + entry() + "max-sessions = 1  # for now\n"
    grown = with_entry(text, new_entry("bob", "tml-b", NO_LIMITS), "x")
    assert grown.startswith(text)
    assert [key.name for key in parse_keys(grown, "x")] == ["alice", "bob"]
    assert without_entry(grown, "bob", "x").strip() == text.strip()
    assert [key.name for key in parse_keys(without_entry(grown, "alice", "x"), "x")] == ["bob"]
    assert parse_keys(without_entry(text, "alice", "x"), "x") == ()


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        (entry(), "bob", "x: there is no key named 'bob'; there are alice"),
        ("", "bob", "x: there is no key named 'bob'; there are none"),
        (f'keys = [{{name = "bob", sha256 = "{DIGEST}"}}]', "bob", "remove the entry of 'bob' by hand"),
    ],
)
def test_what_cannot_be_taken_out(text: str, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        without_entry(text, name, "x")


def test_a_name_is_added_once() -> None:
    with pytest.raises(ConfigError, match="there is already a key named 'alice'; revoke it first"):
        with_entry(entry(), new_entry("alice", "tml-k", NO_LIMITS), "x")


def test_a_new_entry_is_a_valid_one() -> None:
    text = new_entry("alice", "tml-k", NO_LIMITS)
    assert parse_keys(text, "x") == (ApiKey("alice", sha256(b"tml-k").hexdigest()),)
    assert not re.search("tml-", text)
    assert tomllib.loads(text)["keys"][0]["name"] == "alice"


@pytest.mark.parametrize("number", ["9" * 5000, "0x" + "f" * 5000])
def test_a_number_without_end_is_refused_in_words(number: str) -> None:
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        parse_keys(f"{new_entry('alice', 'tml-k', NO_LIMITS)}max-in-flight = {number}\n", "keys.toml")
