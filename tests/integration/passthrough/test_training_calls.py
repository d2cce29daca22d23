"""Sessions, futures and saved weights, where a training server and the gateway must agree."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import pytest

from shared.core import ids, trainer_ids
from shared.core.callers import ApiKey, KeyLimits
from tests.app_bench import API, KEY_A, KEY_B, KEYS
from tests.exchanges import Answered
from tests.integration.passthrough.passage import Passage, asking, body_of, head_of, training_passage
from tests.integration.passthrough.raw_upstream import Exchange, reply, soon
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SESSION: Final = "trainer~session.1"
MODEL_ID: Final = f"{SESSION}:train:0"
PATH: Final = "tinker://run-1/sampler_weights/3"
SAMPLER: Final = f"{SESSION}:sample:0"


class Script:
    """A training server that answers each path as it is told: `(status, document)`, or raw bytes."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {
            "create_session": (200, {"session_id": SESSION, "info_message": "hi"}),
            "session_heartbeat": (200, {}),
        } | answers
        self.asked: list[tuple[str, Any]] = []

    async def __call__(self, exchange: Exchange) -> None:
        path = exchange.line.split(" ")[1].removeprefix("/prefix" + API + "/")
        body = await exchange.whole_body()
        self.asked.append((path, json.loads(body) if body else None))
        answer = self.answers[path.split("/")[0]]
        answer = answer.pop(0) if isinstance(answer, list) else answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            answer = (200, {})
        if isinstance(answer, bytes):
            await exchange.say(answer)
        else:
            status, document = answer
            await exchange.say(reply(f"{status} X", json.dumps(document).encode(), "Content-Type: application/json"))

    def count(self, path: str) -> int:
        return sum(asked == path for asked, _ in self.asked)


@pytest.fixture
async def passage() -> AsyncIterator[Passage]:
    async with training_passage() as passage:
        yield passage


async def call(passage: Passage, path: str, body: Any, key: str = KEY_A) -> Answered:
    headers = ("Content-Type: application/json", f"X-API-Key: {key}")
    answered = await passage.ask(asking("POST", f"{API}/{path}", *headers, body=json.dumps(body).encode()))
    head = head_of(answered)
    return Answered(int(head.pop(":status")), head, body_of(answered))


async def bind(passage: Passage, session_id: str = SESSION, key: str = KEY_A) -> Answered:
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "sim/tiny"}
    return await call(passage, "create_sampling_session", body, key)


@pytest.mark.parametrize("told", [(200, {"base_model": "sim/tiny", "is_lora": True}), (404, {}), b"no HTTP\r\n\r\n"])
async def test_whoever_trained_an_adapter_is_asked_what_it_belongs_to(told: Any) -> None:
    """And a trainer that does not know, or is in trouble, is no reason not to sample."""
    async with training_passage(lora_path="/adapters/{run_id}/{checkpoint}") as passage:
        passage.upstream.handler = script = Script(weights_info=told)
        adapter = {"id": "run-1--3", "parent": "sim/tiny", "max_model_len": 4096}
        base = {"id": "sim/tiny", "max_model_len": 4096}
        passage.bench.upstream.listing = json.dumps({"data": [base, adapter]}).encode()
        body = {"session_id": SESSION, "sampling_session_seq_id": 0, "model_path": PATH}
        assert (await call(passage, "create_sampling_session", body)).status == 200
        assert ("weights_info", {"tinker_path": PATH}) in script.asked
        assert (await bind(passage)).status == 200
        assert script.count("weights_info") == 1, "a base model needs no answer"


async def test_a_session_is_made_there_and_known_here(passage: Passage) -> None:
    passage.upstream.handler = Script()
    made = await call(passage, "create_session", {"tags": [], "sdk_version": "0.38.0"})
    assert (made.status, made.json) == (200, {"session_id": SESSION, "info_message": "hi"})
    bound = await bind(passage)
    assert bound.status == 200
    session = passage.bench.sessions.get(
        bound.json["sampling_session_id"], passage.bench.parts.live.keyring.identify(None)
    )
    assert session.session_id == trainer_ids.session_name(SESSION, ids.ANONYMOUS_SECRET, foreign=True)
    assert (await passage.bench.asample(of=session)).status == 200


async def test_a_session_that_redis_lost_is_still_its_callers(passage: Passage) -> None:
    """A20: there is no record of it that could be lost."""
    passage.upstream.handler = Script(session_heartbeat=(200, {}))
    first = await bind(passage)
    passage.bench.server.wipe()
    assert (await call(passage, "session_heartbeat", {"session_id": SESSION})).status == 200
    assert (await bind(passage)).body == first.body


@pytest.mark.parametrize("document", [{}, {"session_id": ""}, {"session_id": "gws-x"}, {"session_id": "x" * 600}, []])
async def test_a_session_that_cannot_be_known_is_not_handed_on(passage: Passage, document: Any) -> None:
    passage.upstream.handler = Script(create_session=(200, document))
    assert (await call(passage, "create_session", {})).status == 502


async def test_a_refused_session_is_refused_in_the_trainers_words(passage: Passage) -> None:
    passage.upstream.handler = Script(create_session=(402, {"detail": "no credit"}))
    answered = await call(passage, "create_session", {})
    assert (answered.status, answered.json) == (402, {"detail": "no credit"})


async def test_heartbeats_go_to_both_and_the_trainers_answer_counts(passage: Passage) -> None:
    answers: list[Any] = [(200, {}), (404, {"detail": "?"}), (410, {"detail": "over"}), b"HTTP/1.1 500 X\r\n\r\n"]
    script = passage.upstream.handler = Script(session_heartbeat=answers)
    for status in (200, 404, 410):
        assert (await call(passage, "session_heartbeat", {"session_id": SESSION})).status == status
    assert script.count("session_heartbeat") == 3
    name = trainer_ids.session_name(SESSION, ids.ANONYMOUS_SECRET, foreign=True)
    assert name in passage.bench.server.sessions


async def test_a_session_that_the_trainer_does_not_know_is_none(passage: Passage) -> None:
    """By whatever route it is first seen: the trainer is asked before anything is recorded."""
    unknown = (404, {"detail": "?"})
    passage.upstream.handler = Script(session_heartbeat=unknown, sessions=unknown)
    assert (await call(passage, "session_heartbeat", {"session_id": "made-up"})).status == 404
    assert (await call(passage, "sessions/made-up/finish", {})).status == 404
    assert (await bind(passage, "made-up")).status == 404
    await passage.bench.housekeeping.tend_store()
    assert not passage.bench.server.sessions


async def test_a_trainers_session_counts_when_it_is_first_seen() -> None:
    limited = ApiKey(KEY_A, KEYS[0].sha256, KeyLimits(max_sessions=1))
    async with training_passage(api_keys=(limited,)) as passage:
        script = passage.upstream.handler = Script()
        assert (await bind(passage, "s-1")).status == 200
        for _ in range(2):
            assert (await call(passage, "session_heartbeat", {"session_id": "s-2"})).status == 429
            assert (await bind(passage, "s-2")).status == 429
        assert (await call(passage, "session_heartbeat", {"session_id": "s-1"})).status == 200
        assert len(passage.bench.server.sessions) == 1
        asked = script.count("session_heartbeat")
        assert (await bind(passage, "s-1")).status == 200
        assert script.count("session_heartbeat") == asked, "it is known here"


async def test_a_session_of_ours_stays_ours(passage: Passage) -> None:
    """One from before there was a training server."""
    ours = ids.new_session_id(bytes(16), ids.ANONYMOUS_SECRET)
    assert (await call(passage, "session_heartbeat", {"session_id": ours})).status == 200
    assert (await call(passage, f"sessions/{ours}/finish", {})).status == 200
    assert passage.upstream.exchanges == []


async def test_a_finish_ends_what_runs_here_and_is_told_there(passage: Passage) -> None:
    script = passage.upstream.handler = Script(sessions=(200, {"ok": True}))
    bound = await bind(passage)
    session = passage.bench.sessions.get(
        bound.json["sampling_session_id"], passage.bench.parts.live.keyring.identify(None)
    )
    await passage.bench.asample(of=session)
    key = session.key(1)
    await until(lambda: key in passage.bench.executor.started, "the sample to run")
    answered = await call(passage, f"sessions/{SESSION}/finish", {"reason": {"type": "success"}, "detail": None})
    assert (answered.status, answered.json) == (200, {"ok": True})
    assert script.count(f"sessions/{SESSION}/finish") == 1
    await until(lambda: key in passage.bench.executor.interrupted, "the sample to be ended")
    assert (await call(passage, "session_heartbeat", {"session_id": SESSION})).status == 410
    assert (await passage.bench.asample(2, of=session)).status == 410


async def test_two_callers_of_one_session_share_nothing() -> None:
    """A11: who presents another's session names one in which nothing ever happened."""
    async with training_passage(api_keys=KEYS) as passage:
        passage.upstream.handler = Script(sessions=(200, {}))
        mine, other = await bind(passage, "s-1", KEY_A), await bind(passage, "s-1", KEY_B)
        assert mine.json != other.json
        caller = passage.bench.parts.live.keyring.identify(KEY_A)
        session = passage.bench.sessions.get(mine.json["sampling_session_id"], caller)
        assert (await passage.bench.asample(of=session, key=KEY_A)).status == 200
        key = session.key(1)
        await until(lambda: key in passage.bench.executor.started, "the sample to run")
        assert (await call(passage, "sessions/s-1/finish", {}, KEY_B)).status == 200
        assert (await passage.bench.asample(2, of=session, key=KEY_A)).status == 200
        assert passage.bench.executor.interrupted == []
        assert (await call(passage, "sessions/s-1/finish", {}, KEY_A)).status == 200
        await until(lambda: key in passage.bench.executor.interrupted, "the sample to be ended")


async def test_a_key_opens_no_more_sessions_there_than_here() -> None:
    keys = (ApiKey("a", sha256(KEY_A.encode()).hexdigest(), KeyLimits(max_sessions=1)),)
    async with training_passage(api_keys=keys) as passage:
        script = passage.upstream.handler = Script()
        assert (await call(passage, "create_session", {})).status == 200
        assert (await call(passage, "create_session", {})).status == 429
        assert script.count("create_session") == 1


# -- futures ----------------------------------------------------------------------------------------------------


async def test_a_future_of_the_trainer_is_polled_there(passage: Passage) -> None:
    result = reply("200 OK", b"\x0a\x01x", "Content-Type: application/x-protobuf")
    script = passage.upstream.handler = Script(retrieve_future=[(408, {"type": "try_again"}), result])
    body = {"request_id": "future/7", "allow_metadata_only": True}
    assert (await call(passage, "retrieve_future", body)).status == 408
    answered = await call(passage, "retrieve_future", body)
    assert (answered.body, answered.headers["content-type"]) == (b"\x0a\x01x", "application/x-protobuf")
    assert script.asked == [("retrieve_future", body)] * 2


@pytest.mark.parametrize(("status", "seen"), [(500, 429), (503, 429), (404, 404), (410, 410), (400, 400), (402, 402)])
async def test_a_poll_is_never_a_5xx(passage: Passage, status: int, seen: int) -> None:
    """A9: the SDK would repeat it without any pause."""
    passage.upstream.handler = Script(retrieve_future=(status, {"detail": "x"}))
    assert (await call(passage, "retrieve_future", {"request_id": "7"})).status == seen


async def test_a_poll_of_a_trainer_that_is_away_is_429(passage: Passage) -> None:
    await passage.upstream.stop()
    assert (await call(passage, "retrieve_future", {"request_id": "7"})).status == 429


async def test_a_silent_trainer_is_answered_for() -> None:
    async with training_passage(poll_timeout_s=0.05) as passage:
        passage.upstream.handler = Script(retrieve_future=asyncio.Event())
        answered = await call(passage, "retrieve_future", {"request_id": "7"})
        assert (answered.status, answered.json["type"]) == (408, "try_again")
        await until(lambda: passage.trainer.in_flight == 0, "the exchange to be over")


async def test_a_drain_sends_held_polls_back(passage: Passage) -> None:
    """B12"""
    passage.upstream.handler = Script(retrieve_future=asyncio.Event())
    polling = asyncio.create_task(call(passage, "retrieve_future", {"request_id": "7"}))
    await until(lambda: passage.upstream.exchanges, "the trainer to be asked")
    passage.trainer.send_back()
    assert (await soon(polling)).status == 408


async def test_without_a_trainer_a_foreign_future_is_unknown() -> None:
    async with training_passage() as passage:
        passage.bench.use(trainer=None)
        answered = await passage.bench.retrieve("future/7")
        assert answered.status == 404


# -- saved weights ----------------------------------------------------------------------------------------------


async def saved(passage: Passage, key: str = KEY_A) -> str:
    """The wrapped id of a save's future."""
    body = {"model_id": MODEL_ID, "seq_id": 1, "sampling_session_seq_id": 0, "type": "save_weights_for_sampler"}
    promised = await call(passage, "save_weights_for_sampler", body, key)
    assert promised.status == 200
    assert promised.json["model_id"] == MODEL_ID
    request_id: str = promised.json["request_id"]
    return request_id


PROMISE: Final = (200, {"request_id": "future/1", "model_id": MODEL_ID})


@pytest.mark.parametrize("path_told", [True, False])
async def test_a_sampling_session_that_was_born_there_becomes_one_of_ours(passage: Passage, path_told: bool) -> None:
    result: dict[str, Any] = {"sampling_session_id": SAMPLER, "type": "save_weights_for_sampler"}
    result |= {"path": PATH} if path_told else {}
    script = passage.upstream.handler = Script(
        save_weights_for_sampler=PROMISE,
        retrieve_future=[(408, {"type": "try_again"}), (200, result), (200, result)],
        samplers=(200, {"sampler_id": SAMPLER, "base_model": "sim/tiny", "model_path": PATH}),
    )
    request_id = await saved(passage)
    assert (await call(passage, "retrieve_future", {"request_id": request_id})).status == 408
    first = await call(passage, "retrieve_future", {"request_id": request_id})
    again = await call(passage, "retrieve_future", {"request_id": request_id})
    assert first.body == again.body
    assert first.json == result | {"sampling_session_id": first.json["sampling_session_id"]}
    assert {asked["request_id"] for path, asked in script.asked if path == "retrieve_future"} == {"future/1"}
    caller = passage.bench.parts.live.keyring.identify(None)
    session = passage.bench.sessions.get(first.json["sampling_session_id"], caller)
    assert session.model.model_path == PATH
    assert session.session_id == trainer_ids.session_name(SESSION, caller.secret, foreign=True)
    assert (await passage.bench.asample(of=session)).status == 200
    assert script.asked[-1][0] == ("retrieve_future" if path_told else "samplers/trainer~session.1:sample:0")


async def test_a_named_checkpoint_is_left_as_it_is(passage: Passage) -> None:
    result = {"path": PATH, "type": "save_weights_for_sampler"}
    passage.upstream.handler = Script(save_weights_for_sampler=PROMISE, retrieve_future=(200, result))
    assert (await call(passage, "retrieve_future", {"request_id": await saved(passage)})).json == result


async def test_a_failed_save_is_told_in_the_trainers_words(passage: Passage) -> None:
    failure = {"error": "disk full", "category": "server"}
    passage.upstream.handler = Script(save_weights_for_sampler=PROMISE, retrieve_future=(200, failure))
    assert (await call(passage, "retrieve_future", {"request_id": await saved(passage)})).json == failure


@pytest.mark.parametrize(
    ("samplers", "status"),
    [((500, {}), 429), ((404, {}), 200), ((200, {"model_path": None}), 200), ((200, {"model_path": "/x"}), 200)],
)
async def test_weights_that_nobody_can_name_are_a_failure_in_words(
    passage: Passage, samplers: tuple[int, Any], status: int
) -> None:
    result = {"sampling_session_id": SAMPLER}
    passage.upstream.handler = Script(
        save_weights_for_sampler=PROMISE, retrieve_future=(200, result), samplers=samplers
    )
    answered = await call(passage, "retrieve_future", {"request_id": await saved(passage)})
    assert answered.status == status
    if status == 200:
        assert answered.json["category"] == "server" and "weights" in answered.json["error"]


async def test_a_wrapped_future_is_its_owners_alone() -> None:
    """A11"""
    async with training_passage(api_keys=KEYS) as passage:
        script = passage.upstream.handler = Script(save_weights_for_sampler=PROMISE)
        request_id = await saved(passage)
        assert (await call(passage, "retrieve_future", {"request_id": request_id}, KEY_B)).status == 404
        assert script.count("retrieve_future") == 0


@pytest.mark.parametrize(("status", "body"), [(429, {"detail": "slow"}), (200, {"odd": 1}), (400, {"detail": "no"})])
async def test_what_is_no_promise_is_passed_back(passage: Passage, status: int, body: Any) -> None:
    passage.upstream.handler = Script(save_weights_for_sampler=(status, body))
    answered = await call(passage, "save_weights_for_sampler", {"model_id": MODEL_ID})
    assert (answered.status, answered.json) == (status, body)
