"""Ids describe themselves, belong to one owner, and cannot be altered."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core import ids
from shared.core.model import MAX_SEQ_ID, ModelRef, SampleKey, SamplingSession

RANDOM = bytes(range(16))
ALICE = ids.owner_secret("tml-alice")
BOB = ids.owner_secret("tml-bob")
URL_SAFE = set(string.ascii_letters + string.digits + "-_.~:")
MODELS = st.one_of(
    st.builds(ModelRef, base_model=st.text(min_size=1, max_size=60)),
    st.builds(ModelRef, model_path=st.text(min_size=1, max_size=60)),
)


def make(session_id: str | None = None, secret: bytes = ALICE, ordinal: bytes = b"0") -> SamplingSession:
    return ids.sampling_session(
        session_id or ids.new_session_id(RANDOM, secret), ordinal, ModelRef(base_model="org/model"), secret
    )


@given(random=st.binary(min_size=16, max_size=16))
def test_a_session_belongs_to_the_key_that_made_it(random: bytes) -> None:
    session_id = ids.new_session_id(random, ALICE)
    assert set(session_id) <= URL_SAFE
    assert ids.owns_session(session_id, ALICE)
    assert not ids.owns_session(session_id, BOB)


@given(model=MODELS, ordinal=st.binary(max_size=8), session_id=st.text(min_size=1, max_size=60))
def test_a_sampling_session_is_rebuilt_from_its_id_alone(model: ModelRef, ordinal: bytes, session_id: str) -> None:
    made = ids.sampling_session(session_id, ordinal, model, ALICE)
    assert set(made.sampling_session_id) <= URL_SAFE
    assert ids.parse_sampling_session(made.sampling_session_id, ALICE) == made
    assert ids.parse_sampling_session(made.sampling_session_id, BOB) is None


def test_creating_it_again_gives_the_same_id() -> None:
    """The SDK repeats create_sampling_session with the same pair; any worker answers alike."""
    session_id = ids.new_session_id(RANDOM, ALICE)
    assert make(session_id) == make(session_id)
    assert make(session_id).session_key != make(session_id, ordinal=b"1").session_key


def test_two_owners_of_one_session_name_share_nothing() -> None:
    """A trainer's session ids may be guessable: the key in the store is the owner's all the same."""
    model = ModelRef(base_model="m")
    assert (
        ids.sampling_session("s1", b"0", model, ALICE).session_key
        != ids.sampling_session("s1", b"0", model, BOB).session_key
    )


def test_every_altered_character_makes_it_foreign() -> None:
    text = make().sampling_session_id
    for place in range(len(text)):
        altered = text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :]
        assert ids.parse_sampling_session(altered, ALICE) is None, place


@pytest.mark.parametrize("text", ["", "abc", "gwss-", "gws-" + "A" * 32, "ü" * 40, "A" * 10_000, "gwss-\0", "a:b:c"])
def test_what_is_not_of_our_form_is_nobodys(text: str) -> None:
    """A7"""
    assert ids.parse_sampling_session(text, ALICE) is None
    assert not ids.owns_session(text, ALICE)


@given(seq_id=st.integers(min_value=0, max_value=MAX_SEQ_ID))
def test_a_request_id_gives_back_its_parts(seq_id: int) -> None:
    """A10: no seq_id is rounded, 2**53 + 1 and 2**63 - 1 included."""
    session = make()
    assert ids.split_request_id(ids.request_id(session, seq_id)) == (session.sampling_session_id, seq_id)


@pytest.mark.parametrize(
    "text",
    ["", ":", "x", "x:", ":1", "x:01", "x:-1", "x:1.0", f"x:{MAX_SEQ_ID + 1}", "x:\uff11", "1" * 10_000, "x:1\n"],
)
def test_other_request_ids_are_refused(text: str) -> None:
    """A7, A19"""
    assert ids.split_request_id(text) is None


def test_sequence_ids_are_distinct_and_repeatable() -> None:
    """A8"""
    key = SampleKey("k", 7)
    labels = ids.sequence_ids(key, 16)
    assert len(set(labels)) == 16
    assert labels == ids.sequence_ids(key, 16)
    assert not set(labels) & set(ids.sequence_ids(SampleKey("k", 8), 16))
