"""Who is calling."""

from __future__ import annotations

from hashlib import sha256

import pytest

from shared.core.callers import ANONYMOUS, ApiKey, KeyLimits, Keyring
from shared.core.errors import Unauthorized

KEYS = [ApiKey(name, sha256(key.encode()).hexdigest()) for name, key in (("a", "tml-a"), ("b", "tml-b"))]


def test_without_keys_everybody_is_one_owner() -> None:
    assert Keyring(None).identify(None) is Keyring(None).identify("tml-x") is ANONYMOUS
    assert Keyring(None).knows(ANONYMOUS.digest)


def test_an_empty_list_of_keys_lets_nobody_in() -> None:
    with pytest.raises(Unauthorized):
        Keyring([]).identify("tml-a")
    assert not Keyring([]).knows(ANONYMOUS.digest)


def test_a_key_that_took_over_a_name_is_another_one() -> None:
    before = Keyring(KEYS).identify("tml-a")
    after = Keyring([ApiKey("a", sha256(b"tml-new").hexdigest())])
    assert Keyring(KEYS).knows(before.digest)
    assert not after.knows(before.digest)
    assert after.identify("tml-new").name == before.name


def test_limits_come_with_the_caller() -> None:
    limits = KeyLimits(max_sessions=2)
    assert Keyring([ApiKey("a", KEYS[0].sha256, limits)]).identify("tml-a").limits == limits


@pytest.mark.parametrize(("keys", "shared"), [(None, False), ([], False), (KEYS[:1], False), (KEYS, True)])
def test_sharing_takes_two(keys: list[ApiKey] | None, shared: bool) -> None:
    assert Keyring(keys).shared is shared


def test_known_keys_are_told_apart() -> None:
    keyring = Keyring(KEYS)
    assert keyring.identify("tml-a").name == "a"
    assert keyring.identify("tml-a") == keyring.identify("tml-a")
    assert keyring.identify("tml-a").secret != keyring.identify("tml-b").secret


@pytest.mark.parametrize("key", [None, "", "tml-c", "x" * 100_000])
def test_others_are_refused_and_not_remembered(key: str | None) -> None:
    keyring = Keyring(KEYS)
    with pytest.raises(Unauthorized):
        keyring.identify(key)
    assert not keyring._seen


def test_the_owner_secret_is_not_the_stored_hash() -> None:
    """A keys file that leaks does not let anybody forge ids."""
    assert Keyring(KEYS).identify("tml-a").secret != bytes.fromhex(KEYS[0].sha256)
