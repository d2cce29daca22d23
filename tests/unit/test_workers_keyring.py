"""Who is calling."""

from __future__ import annotations

from hashlib import sha256

import pytest

from shared.config import ApiKey
from shared.core.errors import Unauthorized
from workers.keyring import ANONYMOUS, Keyring

KEYS = [ApiKey(name, sha256(key.encode()).hexdigest()) for name, key in (("a", "tml-a"), ("b", "tml-b"))]


def test_without_keys_everybody_is_one_owner() -> None:
    assert Keyring([]).identify(None) is Keyring([]).identify("tml-x") is ANONYMOUS


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
