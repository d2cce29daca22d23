"""Names for what a trainer made: nothing to be lost, and nothing of another's."""

from __future__ import annotations

import string

import pytest

from shared.core import ids, trainer_ids
from shared.core.trainer_ids import TrainerFuture

A = ids.owner_secret("tml-a")
B = ids.owner_secret("tml-b")
FOREIGN = "0f1e-session"


def name(session_id: str = FOREIGN, secret: bytes = A) -> str:
    found = trainer_ids.session_name(session_id, secret, foreign=True)
    assert found is not None
    return found


def test_a_session_has_one_name_per_caller_on_every_worker() -> None:
    assert name() == name()
    assert len({name(), name(secret=B), name("other")}) == 3


@pytest.mark.parametrize("session_id", ["x", "a b/c?d#e", "gwf-x", "é" * 200, "x" * 512, "\0"])
def test_whatever_the_trainer_calls_it_the_name_is_short_and_plain(session_id: str) -> None:
    found = name(session_id)
    assert len(found) == 36
    assert set(found) <= set(string.ascii_letters + string.digits + "-_")
    assert FOREIGN not in found


@pytest.mark.parametrize("session_id", ["", "x" * 513, "é" * 300, "\ud800"])
def test_an_id_that_cannot_be_named_is_nobodys(session_id: str) -> None:
    assert trainer_ids.session_name(session_id, A, foreign=True) is None


def test_a_session_of_ours_keeps_its_id_and_its_owner() -> None:
    ours = ids.new_session_id(bytes(16), A)
    for foreign in (True, False):
        assert trainer_ids.session_name(ours, A, foreign=foreign) == ours
        assert trainer_ids.session_name(ours, B, foreign=foreign) is None


def test_without_a_trainer_there_are_no_foreign_sessions() -> None:
    assert trainer_ids.session_name(FOREIGN, A, foreign=False) is None


@pytest.mark.parametrize(
    ("model_id", "session_id"),
    [
        ("s:train:0", "s"),
        ("a:b:train:12", "a:b"),
        ("s:train:x", "s:train:x"),
        ("model_1", "model_1"),
        (":train:0", ":train:0"),
    ],
)
def test_the_session_of_a_model(model_id: str, session_id: str) -> None:
    assert trainer_ids.session_of_model(model_id) == session_id


@pytest.mark.parametrize("request_id", ["17", "s:train:0:3", "ü/?", "x" * 512])
def test_a_wrapped_future_says_what_it_is_to_its_owner_alone(request_id: str) -> None:
    future = TrainerFuture(request_id, name())
    wrapped = trainer_ids.wrap_future(future, A)
    assert len(wrapped) <= ids.MAX_ID_CHARS
    assert trainer_ids.is_wrapped(wrapped) and not trainer_ids.is_of_sample(wrapped)
    assert trainer_ids.unwrap_future(wrapped, A) == future
    assert trainer_ids.unwrap_future(wrapped, B) is None


def test_every_altered_character_makes_a_wrapped_future_foreign() -> None:
    wrapped = trainer_ids.wrap_future(TrainerFuture("future-1", name()), A)
    for place, character in enumerate(wrapped):
        other = wrapped[:place] + ("A" if character != "A" else "B") + wrapped[place + 1 :]
        assert trainer_ids.unwrap_future(other, A) is None, place


def test_a_sampling_session_born_there_is_like_one_of_ours() -> None:
    born = trainer_ids.born_session(name(), "sampler-1", "tinker://run/weights/1", A)
    assert born == trainer_ids.born_session(name(), "sampler-1", "tinker://run/weights/1", A)
    assert ids.parse_sampling_session(born.sampling_session_id, A) == born
    assert ids.parse_sampling_session(born.sampling_session_id, B) is None
    assert (born.session_id, born.model.model_path) == (name(), "tinker://run/weights/1")
    other = trainer_ids.born_session(name(), "sampler-2", "tinker://run/weights/1", A)
    assert other.session_key != born.session_key
