"""The packed commands of a sample are, byte for byte, what hiredis makes of the same arguments."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.core.lifecycle import State
from shared.core.model import MAX_SEQ_ID, SampleKey
from shared.core.record import HEADER_BYTES, Claim, pack, pack_header
from shared.redis.connection import encode
from shared.store import schema, scripts
from shared.store.schema import Keys, member
from shared.store.templates import FIRST_LOOK_BYTES, PackedCommands

names = st.text(st.characters(codec="utf-8"), max_size=24)
owners = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=16, max_size=16)
sample_keys = st.builds(SampleKey, names, st.integers(0, MAX_SEQ_ID))
claims = st.builds(
    Claim, owners, st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.binary(min_size=16, max_size=16)
)


@given(names, sample_keys, claims)
def test_begin(prefix: str, key: SampleKey, claim: Claim) -> None:
    keys, header = Keys(prefix), pack_header(State.PENDING, claim)
    names = [keys.sample(key), keys.open_set(claim.owner)]
    expected = b"".join(encode(("EVALSHA", scripts.BEGIN.name, "2", *names, header, member(key))))
    assert PackedCommands(keys).begin(claim.owner, member(key).encode(), header) == expected


@given(names, sample_keys, claims, st.binary(max_size=1000), st.integers(1, 2**53), st.integers(0, 2**53))
def test_settle(prefix: str, key: SampleKey, claim: Claim, payload: bytes, ttl_ms: int, now_ms: int) -> None:
    keys, entry = Keys(prefix), schema.log_entry(key, State.READY, len(payload), now_ms)
    log = keys.log(key.session_key, key.clone_id)
    names = [keys.sample(key), keys.open_set(claim.owner), log]
    record = pack(State.READY, claim, payload)
    expected = b"".join(encode(("EVALSHA", scripts.SETTLE.name, "3", *names, record, ttl_ms, member(key), entry, 77)))
    packed = PackedCommands(keys).settle(
        claim.owner,
        member(key).encode(),
        log.encode(),
        pack_header(State.READY, claim),
        payload,
        b"%d" % ttl_ms,
        entry,
        b"77",
    )
    assert packed == expected


@given(names, sample_keys)
def test_first_look(prefix: str, key: SampleKey) -> None:
    keys = Keys(prefix)
    expected = b"".join(encode(("GETRANGE", keys.sample(key), "0", str(FIRST_LOOK_BYTES - 1))))
    assert PackedCommands(keys).first_look(member(key).encode()) == expected


def test_each_owner_has_its_own_open_set() -> None:
    packed, header = PackedCommands(Keys("gw")), bytes(HEADER_BYTES)
    first = packed.begin("owner-0000000000", b"K:1", header)
    assert b"gw:o:{other-0000000000}" in packed.begin("other-0000000000", b"K:1", header)
    assert packed.begin("owner-0000000000", b"K:1", header) == first
