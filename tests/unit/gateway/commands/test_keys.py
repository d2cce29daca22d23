"""`gateway keys`: the file as a whole, and what is printed."""

from __future__ import annotations

import os
from hashlib import sha256
from typing import TYPE_CHECKING

import pytest

from gateway import cli
from gateway.settings.keys_file import new_entry, parse_keys
from shared.core.callers import NO_LIMITS, KeyLimits

if TYPE_CHECKING:
    from pathlib import Path


class Keys:
    """The commands on one file."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self._capsys = capsys

    def __call__(self, command: str, *arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(["keys", command, *arguments, "--api-keys-file", str(self.path)])
        printed = self._capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, printed.out, printed.err

    def add(self, *arguments: str) -> str:
        """The new key."""
        code, out, err = self("add", *arguments)
        assert code == 0, err
        return out.strip().removeprefix("TINKER_API_KEY=")

    def parsed(self) -> dict[str, tuple[str, KeyLimits]]:
        return {key.name: (key.sha256, key.limits) for key in parse_keys(self.path.read_text(), "x")}


@pytest.fixture
def keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Keys:
    return Keys(tmp_path / "keys.toml", capsys)


def test_a_key_is_made_with_its_limits_and_printed_once(keys: Keys) -> None:
    key = keys.add("alice", "--max-in-flight", "5", "--max-in-flight-bytes", "1KiB")
    assert key.startswith("tml-")
    limits = KeyLimits(max_in_flight=5, max_in_flight_bytes=1024)
    assert keys.parsed() == {"alice": (sha256(key.encode()).hexdigest(), limits)}
    assert key not in keys.path.read_text()


def test_the_file_is_its_owners_alone_and_no_draft_stays(keys: Keys) -> None:
    keys.add("alice")
    keys.path.chmod(0o644)
    keys.add("bob")
    assert keys.path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(keys.path.parent) == [keys.path.name]


def test_a_link_stays_one(keys: Keys) -> None:
    real = keys.path.with_name("real.toml")
    keys.path.symlink_to(real)
    keys.add("alice")
    assert keys.path.is_symlink()
    assert "alice" in real.read_text()


def test_listed_without_what_would_let_anybody_in(keys: Keys) -> None:
    key = keys.add("alice", "--max-sessions", "2")
    keys.add("bob")
    _, out, _ = keys("list")
    first, second = out.splitlines()
    assert first.startswith("alice  sha256 ") and first.endswith("max-sessions=2")
    assert second.endswith("no limits")
    assert key not in out and sha256(key.encode()).hexdigest() not in out


def test_the_last_key_is_revoked_like_any_other(keys: Keys) -> None:
    keys.add("alice")
    code, _, err = keys("revoke", "alice")
    assert code == 0
    assert "SIGHUP" in err
    assert keys.parsed() == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("add", "alice"), "there is already a key named 'alice'"),
        (("add", "bob", "--max-sessions", "none"), "bob: max-sessions: 'none' is not allowed; give a whole number"),
        (("add", 'b"'), "use printable text"),
        (("revoke", "bob"), "there is no key named 'bob'; there are alice"),
    ],
)
def test_refusals_are_one_line_and_change_nothing(keys: Keys, arguments: tuple[str, ...], words: str) -> None:
    keys.add("alice")
    before = keys.path.read_bytes()
    code, out, err = keys(*arguments)
    assert (code, out, err.count("\n")) == (cli.EXIT_CONFIG, "", 1)
    assert words in err
    assert keys.path.read_bytes() == before


@pytest.mark.parametrize("command", [("add", "alice"), ("list",)])
def test_a_place_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str]
) -> None:
    code, _, err = Keys(tmp_path / "no" / "keys.toml", capsys)(*command)
    assert code == cli.EXIT_CONFIG
    assert "keys.toml' cannot be used: No such file or directory" in err


def test_a_write_that_fails_leaves_the_old_file(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    keys.add("alice")
    before = keys.path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    code, out, err = keys("add", "bob")
    assert (code, out) == (cli.EXIT_CONFIG, "")
    assert "No space left" in err
    assert keys.path.read_bytes() == before
    assert os.listdir(keys.path.parent) == [keys.path.name]


def test_a_key_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["new-key", "al"])
    first, _, entry = capsys.readouterr().out.partition("\n\n")
    assert first.startswith("TINKER_API_KEY=tml-")
    assert entry == new_entry("al", first.removeprefix("TINKER_API_KEY="), NO_LIMITS)
