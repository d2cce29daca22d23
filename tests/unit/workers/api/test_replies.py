"""The one table of statuses: complete, and never a 5xx where the SDK would repeat it without a pause."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from shared.core import errors
from shared.core.errors import StoreError, StoreFull, StoreRefused, StoreUnavailable
from shared.core.lifecycle import ANSWERS, Answer, State
from shared.redis.connection import Redirected
from workers.api import replies

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = {
    errors.Overloaded: errors.Overloaded("in_flight", "too many"),
    # Imported here, so that it is among the leaves whatever else was.
    Redirected: Redirected("MOVED 1 10.0.0.1:6379"),
    StoreUnavailable: StoreUnavailable("Connection refused by 10.0.0.1:6379", maybe_done=True),
}
# What is not on the way of a sample may be answered with a 5xx: there the SDK pauses before it repeats.
NOT_OURS = {errors.NotImplementedHere, errors.ReplyBroken, errors.UpstreamBroke, errors.UpstreamUnavailable}
# Never raised while a request is served.
AT_START = {errors.ConfigError, errors.StartError}


def leaves(kind: type[errors.GatewayError]) -> Iterator[type[errors.GatewayError]]:
    subclasses = [found for found in kind.__subclasses__() if found.__module__.startswith("shared.")]
    if not subclasses:
        yield kind
    for subclass in subclasses:
        yield from leaves(subclass)


LEAVES = sorted(set(leaves(errors.GatewayError)) - AT_START, key=lambda kind: kind.__name__)


def raised(kind: type[errors.GatewayError]) -> errors.GatewayError:
    return EXAMPLES.get(kind) or kind("some words")


@pytest.mark.parametrize("kind", LEAVES)
def test_every_error_has_a_status_and_a_body(kind: type[errors.GatewayError]) -> None:
    """A 400 without a body reads as a proxy's glitch, and is repeated."""
    assert any(issubclass(kind, known) for known, _ in replies.STATUS_OF_ERROR), f"{kind.__name__} is in no row"
    reply = replies.refusal(raised(kind))
    assert 400 <= reply.status < 500 or kind in NOT_OURS
    assert reply.content_type == replies.JSON
    assert json.loads(bytes(reply.body))["detail"]


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.BadRequest, 400),
        (errors.BodyIncomplete, 400),
        (errors.Unauthorized, 401),
        (errors.NotFound, 404),
        (errors.SessionFinished, 410),
        (errors.BodyTooLarge, 413),
        (errors.UnsupportedEncoding, 415),
        (errors.Overloaded, 429),
        (StoreFull, 429),
        (StoreRefused, 429),
        (StoreUnavailable, 429),
        (errors.NotImplementedHere, 501),
    ],
)
def test_statuses(kind: type[errors.GatewayError], status: int) -> None:
    assert replies.refusal(raised(kind)).status == status


def test_no_row_is_hidden_by_one_above_it() -> None:
    kinds = [kind for kind, _ in replies.STATUS_OF_ERROR]
    for index, kind in enumerate(kinds):
        assert not any(issubclass(kind, above) for above in kinds[:index]), kind


@pytest.mark.parametrize("kind", [kind for kind in LEAVES if issubclass(kind, StoreError)])
def test_the_stores_own_words_are_not_passed_on(kind: type[errors.GatewayError]) -> None:
    """A16"""
    words = bytes(replies.refusal(raised(kind)).body)
    assert b"some words" not in words
    assert b"6379" not in words


def test_a_full_store_is_named_as_the_reason() -> None:
    """C5: the first refusal says so, as all later ones do."""
    assert b"store is full" in bytes(replies.refusal(StoreFull("OOM at 10.0.0.1")).body)


def test_what_nobody_expected_is_retryable_and_says_nothing_of_itself() -> None:
    """A13: never a traceback, never a 5xx."""
    reply = replies.refusal(KeyError("internal name"))
    assert reply.status == 429
    assert b"internal name" not in bytes(reply.body)


def test_every_state_has_an_answer_and_every_answer_a_status_below_500() -> None:
    """A9: the SDK repeats a 5xx on a retrieve without any pause."""
    assert set(ANSWERS) == set(State)
    assert set(replies.STATUS_OF_ANSWER) == set(Answer)
    statuses = {answer: replies.answer(answer, b"{}").status for answer in Answer}
    assert statuses == {Answer.RESULT: 200, Answer.FAILURE: 200, Answer.TRY_AGAIN: 408, Answer.RESUBMIT: 410}


@pytest.mark.parametrize("status", [404, 405])
def test_what_the_router_does_not_know_is_json(status: int) -> None:
    reply = replies.routing_error(status)
    assert reply.status == status
    assert json.loads(bytes(reply.body))["detail"]
