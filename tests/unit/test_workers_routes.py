"""Every route of the public address, in process: what each client sees, whatever the store and other workers do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from shared.core.faults import Fault, FaultClass
from shared.core.lifecycle import State
from shared.core.model import CLONE_SPAN
from shared.histogram import count
from shared.store.base import SessionState
from shared.store.refill import REFILL_S
from shared.wire import proto
from tests.app_bench import API, KEY_A, KEY_B, KEYS, AppBench, asleep, request_id, session_of
from tests.waiting import until
from tests.worker_bench import AWAY, OTHER_OWNER, SESSION_ID, session
from workers.http.watch import Connection
from workers.routes import futures, sampling
from workers.running import Ending

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KEY = session().key(1)
TINY = proto.encode_sample_response(proto.decode_sample_response(b""))
LARGE = Ending(State.READY, bytes(64 * 1024 + 1))
FAILED = Ending(State.FAILED, b'{"error":"no","category":"server"}')
FORMS = ["abc", "", "x" * 10_000, "\u00e9\u4e2d", "gwss-x:1", 100000000000000000000, None, ["r"]]


@pytest.fixture
async def bench() -> AsyncIterator[AppBench]:
    made = await AppBench().open()
    yield made
    await made.close()


@pytest.fixture
async def keyed() -> AsyncIterator[AppBench]:
    made = await AppBench(api_keys=KEYS).open()
    yield made
    await made.close()


class LeavingConnection(Connection):
    """A client that is there when its request is read, and is gone before its reply is."""

    async def drained(self) -> bool:
        self.lose(broken=True)
        return await super().drained()


async def settled(bench: AppBench, ending: Ending | None = None, seq_id: int = 1, **more: Any) -> str:
    """The request id of a sample that was submitted and has ended."""
    promised = await bench.asample(seq_id, **more)
    assert promised.status == 200, promised
    key = (more.get("of") or session()).key(seq_id)
    await until(lambda: key in bench.executor.started)
    bench.executor.finish(key, ending or Ending(State.READY, TINY))
    await until(lambda: bench.dispatcher.running(key) is None)
    return str(promised.json["request_id"])


# -- configuration, sessions, and all that is around ------------------------------------------------------------------


@pytest.mark.parametrize(("version", "session_poll"), [("0.27.1", False), ("0.38.0", True)])
async def test_client_config_fits_the_sdks_version(bench: AppBench, version: str, session_poll: bool) -> None:
    answered = await bench.post("/client/config", {"sdk_version": version})
    assert answered.status == 200
    assert answered.json["sample_use_retrieve_futures"] is session_poll


async def test_the_session_poll_can_be_switched_off() -> None:
    bench = await AppBench(session_poll=False).open()
    answered = await bench.post("/client/config", {"sdk_version": "0.38.0"})
    assert answered.json["sample_use_retrieve_futures"] is False


async def test_dynamic_config(bench: AppBench) -> None:
    assert (await bench.post("/client/dynamic_config", {})).json["sample_cancel_enabled"] is True


async def test_a_new_session_is_the_callers_and_lives(keyed: AppBench) -> None:
    session_id = (await keyed.post("/create_session", {"tags": []}, key=KEY_A)).json["session_id"]
    assert keyed.server.sessions[session_id].state is SessionState.ALIVE
    assert (await keyed.post("/session_heartbeat", {"session_id": session_id}, key=KEY_A)).status == 200
    assert (await keyed.post("/session_heartbeat", {"session_id": session_id}, key=KEY_B)).status == 404


async def test_a_heartbeat_makes_a_lost_session_alive_again(bench: AppBench) -> None:
    """C3"""
    bench.server.wipe()
    assert (await bench.post("/session_heartbeat", {"session_id": SESSION_ID})).status == 200
    assert bench.server.sessions[SESSION_ID].state is SessionState.ALIVE


async def test_a_heartbeat_is_answered_while_the_store_is_away(bench: AppBench) -> None:
    """A1"""
    bench.store.fail_before = AWAY
    assert (await bench.post("/session_heartbeat", {"session_id": SESSION_ID})).status == 200
    assert bench.sessions.take_noted() == [SESSION_ID]


async def test_a_finish_ends_what_runs_here_and_elsewhere(bench: AppBench) -> None:
    other = await AppBench(bench.server, OTHER_OWNER).open()
    await bench.asample(1)
    await other.asample(2)
    await until(lambda: bench.executor.started and other.executor.started)
    assert (await bench.post(f"/sessions/{SESSION_ID}/finish", b"")).status == 200
    await until(lambda: not bench.dispatcher.in_flight and not other.dispatcher.in_flight)
    assert bench.state(session().key(1)) is bench.state(session().key(2)) is State.STALE
    for worker in (bench, other):
        assert (await worker.post("/session_heartbeat", {"session_id": SESSION_ID})).status == 410
        assert (await worker.asample(3)).status == 410
    assert (await bench.post(f"/sessions/{SESSION_ID}/finish", {"reason": {"type": "success"}})).status == 200
    await other.close()


async def test_polls_go_on_after_a_finish(bench: AppBench) -> None:
    finished = await settled(bench)
    await bench.post(f"/sessions/{SESSION_ID}/finish", b"")
    assert (await bench.retrieve(finished)).status == 200
    assert len((await bench.poll_session()).json["completions"]) == 1


async def test_telemetry_is_dropped_unread(bench: AppBench) -> None:
    answered = await bench.post("/telemetry", b"\xff not json")
    assert (answered.status, answered.json) == (200, {"status": "accepted"})


async def test_capabilities(bench: AppBench) -> None:
    answered = await bench.request("GET", f"{API}/get_server_capabilities")
    assert [model["model_name"] for model in answered.json["supported_models"]] == ["sim/tiny"]


async def test_health_needs_no_key_and_nothing_else_does_without(keyed: AppBench) -> None:
    assert (await keyed.request("GET", f"{API}/healthz")).status == 200
    assert (await keyed.request("GET", f"{API}/get_server_capabilities")).status == 401
    assert (await keyed.asample()).status == 401
    assert (await keyed.retrieve("x", key="tml-wrong")).status == 401


async def test_what_the_trainer_serves_is_501_and_says_what_would_help(bench: AppBench) -> None:
    answered = await bench.post("/forward_backward", {})
    assert answered.status == 501
    assert "--training-upstream" in answered.json["detail"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/asample", 405), ("DELETE", "/telemetry", 405)])
async def test_a_wrong_method_is_405(bench: AppBench, method: str, path: str, status: int) -> None:
    answered = await bench.request(method, API + path)
    assert (answered.status, answered.headers["content-type"]) == (status, "application/json")
    assert answered.json["detail"]


async def test_a_slash_too_many_is_no_redirect(bench: AppBench) -> None:
    """It would name whatever Host the client sent, and leave a proxy's TLS."""
    answered = await bench.post("/create_session/", {})
    assert (answered.status, answered.headers["content-type"]) == (501, "application/json")
    assert "location" not in answered.headers


async def test_no_such_path_is_404(bench: AppBench) -> None:
    answered = await bench.request("GET", "/favicon.ico")
    assert (answered.status, answered.headers["content-type"]) == (404, "application/json")


WITH_A_BODY = [
    "/asample",
    "/retrieve_future",
    "/retrieve_futures",
    "/session_heartbeat",
    "/create_session",
    "/cancel_future",
    "/create_sampling_session",
    "/join_sampling_session",
]


@pytest.mark.parametrize("path", WITH_A_BODY)
@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"{", b"[]", b"null", b"[" * 100_000, b'{"request_id":"\\ud800"}'])
async def test_nonsense_is_a_4xx_with_a_json_body(bench: AppBench, path: str, body: bytes) -> None:
    """A13"""
    answered = await bench.request("POST", API + path, body)
    assert 400 <= answered.status < 500
    assert answered.json["detail"]


# -- sampling sessions ------------------------------------------------------------------------------------------------


async def create(bench: AppBench, key: str | None = None, **more: Any) -> Any:
    document = {"session_id": SESSION_ID, "sampling_session_seq_id": 0, "base_model": "sim/tiny"}
    return await bench.post("/create_sampling_session", document | more, key=key)


async def test_the_same_binding_gives_the_same_id_on_every_worker(bench: AppBench) -> None:
    other = await AppBench(bench.server, OTHER_OWNER).open()
    first, second = await create(bench), await create(other)
    assert first.json == second.json
    assert (
        first.json["sampling_session_id"]
        != (await create(bench, sampling_session_seq_id=1)).json["sampling_session_id"]
    )


async def test_without_a_number_every_binding_is_new(bench: AppBench) -> None:
    made = [(await create(bench, sampling_session_seq_id=None)).json["sampling_session_id"] for _ in range(2)]
    assert made[0] != made[1]


async def test_a_model_that_nobody_serves_is_named(bench: AppBench) -> None:
    answered = await create(bench, base_model="nope")
    assert answered.status == 404
    assert "nope" in answered.json["detail"]
    assert "sim/tiny" in answered.json["detail"]


async def test_before_any_upstream_has_answered_it_is_429(bench: AppBench) -> None:
    bench = AppBench()
    bench.upstream.listing = Fault(FaultClass.NEVER_EXECUTED, "refused")
    await bench.open()
    assert (await create(bench)).status == 429


async def test_anothers_session_is_not_found(keyed: AppBench) -> None:
    """A11"""
    session_id = (await keyed.post("/create_session", {}, key=KEY_A)).json["session_id"]
    assert (await create(keyed, KEY_B, session_id=session_id)).status == 404
    assert (await create(keyed, KEY_A, session_id=session_id)).status == 200


async def test_a_sampler_tells_its_model_and_its_path(bench: AppBench) -> None:
    bound = (await create(bench)).json["sampling_session_id"]
    answered = await bench.request("GET", f"{API}/samplers/{bound}")
    assert answered.json == {"sampler_id": bound, "base_model": "sim/tiny"}
    path = "tinker://run-1/sampler_weights/1"
    bound = (await create(bench, base_model=None, model_path=path)).json["sampling_session_id"]
    answered = await bench.request("GET", f"{API}/samplers/{bound}")
    assert answered.json == {"sampler_id": bound, "base_model": "sim/tiny", "model_path": path}
    assert (await bench.request("GET", f"{API}/samplers/nonsense")).status == 404


async def test_clone_numbers_are_in_range_and_unique(bench: AppBench) -> None:
    """A10"""
    joins = [
        await bench.post("/join_sampling_session", {"sampling_session_id": session().sampling_session_id})
        for _ in range(50)
    ]
    numbers = [joined.json["client_counter"] for joined in joins]
    assert len(set(numbers)) == 50
    assert all(1 <= number < CLONE_SPAN for number in numbers)
    assert (await bench.post("/join_sampling_session", {"sampling_session_id": "x"})).status == 404


async def test_a_clone_number_that_is_taken_is_drawn_again(bench: AppBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_CLONES", 2)
    ask = {"sampling_session_id": session().sampling_session_id}
    found = set()
    for _ in range(50):
        answered = await bench.post("/join_sampling_session", ask)
        if answered.status == 200:
            assert answered.json["client_counter"] not in found
            found.add(answered.json["client_counter"])
        else:
            assert answered.status == 429
    assert found == {1, 2}


# -- asample ----------------------------------------------------------------------------------------------------------


async def test_a_promise_names_the_request_and_each_sequence(bench: AppBench) -> None:
    """A8: and the same ones when it is sent again."""
    first, again = await bench.asample(num_samples=3), await bench.asample(num_samples=3)
    assert first.json["request_id"] == request_id()
    assert len(set(first.json["sample_sequence_ids"])) == 3
    assert first.json == again.json
    await until(lambda: bench.executor.started)
    assert bench.executor.started == [KEY]


async def test_the_same_submission_to_two_workers_is_one_sample(bench: AppBench) -> None:
    """A6, A14"""
    other = await AppBench(bench.server, OTHER_OWNER).open()
    first, second = await asyncio.gather(bench.asample(0), other.asample(0))
    assert first.json == second.json
    await until(lambda: bench.executor.started + other.executor.started)
    assert len(bench.executor.started + other.executor.started) == 1
    await other.close()


async def test_two_sessions_may_use_one_number(bench: AppBench) -> None:
    """A5"""
    assert (await bench.asample(1, of=session(0))).status == (await bench.asample(1, of=session(1))).status == 200
    assert bench.dispatcher.in_flight == 2


async def test_another_payload_under_one_number_is_400(bench: AppBench) -> None:
    """A18"""
    await bench.asample()
    answered = await bench.asample(prompt={"chunks": [{"type": "encoded_text", "tokens": [1]}]})
    assert answered.status == 400
    assert "used before" in answered.json["detail"]


@pytest.mark.parametrize("seq_id", [2**53 + 1, 2**63 - 1])
async def test_large_numbers_are_kept_exactly(bench: AppBench, seq_id: int) -> None:
    """A10"""
    answered = await bench.asample(seq_id)
    assert answered.json["request_id"] == request_id(seq_id)


@pytest.mark.parametrize(
    "more",
    [
        {"seq_id": 2**63},
        {"seq_id": None},
        {"num_samples": 0},
        {"num_samples": -3},
        {"num_samples": 100_000},
        {"sampling_params": {"max_tokens": 0}},
        {"sampling_params": {"max_tokens": -1}},
        {"prompt": {"chunks": []}},
        {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5] * 64}]}},
    ],
)
async def test_what_cannot_be_done_is_400_before_anything_is_kept(bench: AppBench, more: dict[str, Any]) -> None:
    """A17, A21, D11"""
    commands = bench.store.commands
    answered = await bench.asample(**more)
    assert answered.status == 400
    assert answered.json["detail"]
    assert bench.dispatcher.in_flight == 0
    assert bench.store.commands == commands


async def test_an_empty_chunk_among_others_is_fine(bench: AppBench) -> None:
    """A17"""
    chunks = [{"type": "encoded_text", "tokens": tokens} for tokens in ([], [5])]
    assert (await bench.asample(prompt={"chunks": chunks})).status == 200


async def test_anothers_sampling_session_is_not_found(keyed: AppBench) -> None:
    """A11"""
    assert (await keyed.asample(of=session_of(KEY_A), key=KEY_B)).status == 404
    assert (await keyed.asample(of=session_of(KEY_A), key=KEY_A)).status == 200


async def test_without_a_sampling_session_every_submission_is_a_sample_of_its_own(bench: AppBench) -> None:
    lone: dict[str, Any] = {"sampling_session_id": None, "seq_id": None, "base_model": "sim/tiny"}
    first, second = await bench.asample(**lone), await bench.asample(**lone)
    assert first.json["request_id"] != second.json["request_id"]
    await until(lambda: len(bench.executor.started) == 2)
    for key in bench.executor.started:
        bench.executor.finish(key)
    assert (await bench.retrieve(first.json["request_id"])).status == 200


async def test_back_pressure_is_429(keyed: AppBench) -> None:
    bench = await AppBench(max_in_flight=1).open()
    await bench.asample(1)
    assert (await bench.asample(2)).status == 429
    bench.store.fail_before = AWAY
    assert (await bench.asample(3)).status == 429
    await bench.close()


# -- retrieve_future --------------------------------------------------------------------------------------------------


async def test_a_poll_is_held_until_the_sample_ends_here(bench: AppBench) -> None:
    promised = (await bench.asample()).json["request_id"]
    poll = asyncio.create_task(bench.retrieve(promised))
    await asleep(bench)
    bench.executor.finish(KEY, Ending(State.READY, b"result"))
    answered = await poll
    assert (answered.status, answered.body) == (200, b"result")
    assert answered.headers["content-type"] == "application/x-protobuf"
    assert len(bench.waiters) == 0


async def test_a_poll_on_another_worker_is_woken(bench: AppBench) -> None:
    other = await AppBench(bench.server, OTHER_OWNER).open()
    promised = (await bench.asample()).json["request_id"]
    poll = asyncio.create_task(other.retrieve(promised))
    await asleep(other)
    assert not poll.done()
    await until(lambda: bench.executor.started)
    bench.executor.finish(KEY, Ending(State.READY, b"result"))
    answered = await poll
    assert (answered.status, answered.body) == (200, b"result")
    assert not any(other.store._watched.values())


async def test_a_poll_that_is_woken_for_nothing_looks_once_and_sleeps_again(bench: AppBench) -> None:
    """C4: a subscription was cut and is back; the sample still runs."""
    other = await AppBench(bench.server, OTHER_OWNER).open()
    promised = (await bench.asample()).json["request_id"]
    polls = [asyncio.create_task(other.retrieve(promised)), asyncio.create_task(other.poll_session())]
    await asleep(other, 2)
    before = other.store.commands
    other.on_gap()
    await asleep(other, 2)
    assert other.store.commands == before + 2
    await until(lambda: bench.executor.started)
    bench.executor.finish(KEY)
    assert [answered.status for answered in await asyncio.gather(*polls)] == [200, 200]
    await other.close()


async def test_a_poll_that_is_not_answered_in_time_is_408_with_the_queues_state() -> None:
    bench = await AppBench(poll_timeout_s=0.01).open()
    promised = (await bench.asample()).json["request_id"]
    answered = await bench.retrieve(promised)
    assert (answered.status, answered.json) == (
        408,
        {"type": "try_again", "request_id": promised, "queue_state": "active"},
    )
    running = bench.dispatcher.running(KEY)
    assert running is not None
    running.paused_reason = "upstream answered 503"
    answered = await bench.retrieve(promised)
    assert answered.json["queue_state"] == "paused_capacity"
    assert answered.json["queue_state_reason"] == "upstream answered 503"
    await bench.close()


async def test_a_poll_at_another_worker_is_told_that_no_upstream_takes_the_sample(bench: AppBench) -> None:
    """A15, D8"""
    other = await AppBench(bench.server, OTHER_OWNER, poll_timeout_s=0.01).open()
    promised = (await bench.asample()).json["request_id"]
    running = bench.dispatcher.running(KEY)
    assert running is not None
    for paused, state in ((True, "paused_capacity"), (False, "active")):
        bench.store.mark_paused(KEY, running.claim, paused=paused)
        answered = await other.retrieve(promised)
        assert (answered.status, answered.json["queue_state"]) == (408, state)
    other.store.fail_before = AWAY
    answered = await other.retrieve(promised)
    assert (answered.status, answered.json["queue_state"]) == (408, "paused_capacity")
    await other.close()


async def test_old_sdks_get_json(bench: AppBench) -> None:
    answered = await bench.retrieve(await settled(bench), accept="application/json")
    assert answered.headers["content-type"] == "application/json"
    assert answered.json["sequences"] == []


async def test_a_failure_is_200_with_its_category(bench: AppBench) -> None:
    answered = await bench.retrieve(await settled(bench, FAILED))
    assert (answered.status, answered.json) == (200, {"error": "no", "category": "server"})


@pytest.mark.parametrize("state", [State.STALE, State.ORPHANED])
async def test_what_was_interrupted_is_410(bench: AppBench, state: State) -> None:
    answered = await bench.retrieve(await settled(bench, Ending(state)))
    assert answered.status == 410
    assert "submit it again" in answered.json["detail"]


async def test_a_well_formed_id_that_is_no_longer_known_is_410(bench: AppBench) -> None:
    """A7, A20"""
    assert (await bench.retrieve(request_id(99))).status == 410
    finished = await settled(bench)
    bench.clock.advance(bench.settings.undelivered_ttl_s)
    assert (await bench.retrieve(finished)).status == 410


@pytest.mark.parametrize("form", FORMS)
async def test_what_is_no_id_of_ours_is_one_plain_404(bench: AppBench, form: Any) -> None:
    """A7, A19: and costs no store a command."""
    commands = bench.store.commands
    answered = await bench.retrieve(form)
    assert (answered.status, answered.json) == (404, {"detail": "there is no such request"})
    assert (await bench.post("/cancel_future", {"request_id": form})).status == 404
    assert bench.store.commands == commands


async def test_anothers_id_is_what_an_unknown_one_is(keyed: AppBench) -> None:
    """A11: the owner's result is untouched."""
    finished = await settled(keyed, Ending(State.READY, b"result"), of=session_of(KEY_A), key=KEY_A)
    unknown = await keyed.retrieve("abc", key=KEY_B)
    stranger = await keyed.retrieve(finished, key=KEY_B)
    assert (stranger.status, stranger.body) == (unknown.status, unknown.body) == (404, unknown.body)
    assert (await keyed.post("/cancel_future", {"request_id": finished}, key=KEY_B)).status == 404
    assert (await keyed.retrieve(finished, key=KEY_A)).body == b"result"


async def test_only_a_delivered_reply_starts_the_clock(bench: AppBench) -> None:
    """A2"""
    finished = await settled(bench, Ending(State.READY, b"result"))
    await bench.retrieve(finished, connection=LeavingConnection())
    await bench.clocks.flush()
    assert bench.left_s(KEY) == bench.settings.undelivered_ttl_s
    bench.clock.advance(400.0)
    assert (await bench.retrieve(finished)).body == b"result"
    await bench.clocks.flush()
    assert bench.left_s(KEY) == bench.settings.retrieved_ttl_s
    bench.clock.advance(100.0)
    assert (await bench.retrieve(finished)).body == b"result"
    await bench.clocks.flush()
    assert bench.left_s(KEY) == bench.settings.retrieved_ttl_s - 100.0


@pytest.mark.parametrize("trace", [None, "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "nonsense"])
async def test_a_sample_keeps_its_callers_trace_context(bench: AppBench, trace: str | None) -> None:
    await bench.asample(trace=trace)
    running = bench.dispatcher.running(KEY)
    assert running is not None
    assert running.trace == (trace if trace != "nonsense" else None)


async def test_the_stages_of_a_sample_are_timed(bench: AppBench) -> None:
    finished = await settled(bench)
    bench.clock.advance(7.0)
    for _ in range(2):  # the second time it was delivered before
        await bench.retrieve(finished)
    stages = bench.counters.stages.snapshot()
    assert {name: (count(histogram), histogram[-1]) for name, histogram in stages.items()} == {
        "accept": (1, 0.0),
        "store": (1, 0.0),
        "delivery": (1, 7.0),
    }
    assert bench.counters.result_bytes == len(TINY)


async def test_a_client_that_leaves_a_held_poll_is_noticed(bench: AppBench) -> None:
    """A2"""
    promised = (await bench.asample()).json["request_id"]
    client = Connection()
    poll = asyncio.create_task(bench.retrieve(promised, connection=client))
    await asleep(bench)
    client.lose(broken=True)
    await poll
    assert bench.counters.polls_abandoned == 1
    assert len(bench.waiters) == 0


async def test_a_size_announcement_starts_no_clock(bench: AppBench) -> None:
    finished = await settled(bench, LARGE)
    answered = await bench.retrieve(finished, allow_metadata_only=True)
    assert answered.json == {"status": "complete_metadata", "response_payload_size": len(LARGE.payload)}
    await bench.clocks.flush()
    assert bench.left_s(KEY) == bench.settings.undelivered_ttl_s
    assert len((await bench.retrieve(finished)).body) == len(LARGE.payload)


async def test_a_small_result_is_never_announced_by_its_size(bench: AppBench) -> None:
    finished = await settled(bench, Ending(State.READY, LARGE.payload[1:]))
    answered = await bench.retrieve(finished, allow_metadata_only=True)
    assert answered.headers["content-type"] == "application/x-protobuf"


async def test_trouble_with_the_store_is_a_held_poll() -> None:
    """A9: never a reply that the SDK repeats at once."""
    bench = await AppBench(poll_timeout_s=0.02).open()
    bench.store.fail_before = AWAY
    for answered in (await bench.retrieve(request_id()), await bench.poll_session()):
        assert answered.status in (200, 408)
    assert bench.store.commands < 10
    assert (await bench.poll_session()).json == {"completions": [], "cursor": 0}


async def test_a_held_poll_is_answered_when_the_store_is_back(bench: AppBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A9, C3"""
    monkeypatch.setattr(futures, "_STORE_RETRY_S", 0.001)
    finished = await settled(bench, Ending(State.READY, b"result"))
    bench.store.fail_before = AWAY
    polls = [asyncio.create_task(bench.retrieve(finished)), asyncio.create_task(bench.poll_session())]
    before = bench.store.commands
    await until(lambda: bench.store.commands > before + 5)
    assert not any(poll.done() for poll in polls)
    bench.store.fail_before = None
    retrieved, polled = await asyncio.gather(*polls)
    assert retrieved.body == b"result"
    assert [entry["request_id"] for entry in polled.json["completions"]] == [finished]


async def test_a_missing_record_says_nothing_while_a_store_is_refilled(
    bench: AppBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: the sample may be running on a worker that has not entered it again."""
    monkeypatch.setattr(futures, "_STORE_RETRY_S", 0.001)
    bench.server.wipe()
    poll = asyncio.create_task(bench.retrieve(request_id(5)))
    before = bench.store.commands
    await until(lambda: bench.store.commands > before + 3)
    assert not poll.done()
    bench.clock.advance(REFILL_S)
    await bench.renew_lease()
    assert (await poll).status == 410


async def test_a_store_that_was_emptied_is_noticed_by_the_first_poll_that_misses_something(
    bench: AppBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: FLUSHALL. The sample that runs elsewhere is waited for, and not submitted again."""
    monkeypatch.setattr(futures, "_STORE_RETRY_S", 0.001)
    other = await AppBench(bench.server, OTHER_OWNER).open()
    promised = (await other.asample()).json["request_id"]
    bench.server.flush()
    noticed = asyncio.Event()
    bench.dispatcher.on_loss = noticed.set
    poll = asyncio.create_task(bench.retrieve(promised))
    async with asyncio.timeout(10):
        await noticed.wait()
    running = other.dispatcher.running(KEY)
    assert running is not None
    await other.store.begin(KEY, running.claim)
    await bench.renew_lease()
    other.executor.finish(KEY)
    assert (await poll).status == 200
    await other.close()


async def test_a_worker_that_is_started_while_others_refill_waits_for_them(
    bench: AppBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: it has not seen the restart itself."""
    monkeypatch.setattr(futures, "_STORE_RETRY_S", 0.001)
    bench.server.wipe()
    young = await AppBench(bench.server, OTHER_OWNER).open()
    assert not young.dispatcher.refilling
    poll = asyncio.create_task(young.retrieve(request_id(5)))
    await asked_again(young)
    assert not poll.done()
    await bench.store.note_refill(bench.owner, window_s=2 * REFILL_S)
    young.clock.advance(REFILL_S)
    await asked_again(young)
    assert not poll.done()
    young.clock.advance(REFILL_S)
    assert (await poll).status == 410
    await young.close()


async def asked_again(bench: AppBench) -> None:
    """Until a held poll has looked some times more."""
    before = bench.store.commands
    await until(lambda: bench.store.commands > before + 6)


async def test_a_draining_worker_sends_held_polls_back(bench: AppBench) -> None:
    """B12"""
    promised = (await bench.asample()).json["request_id"]
    polls = [asyncio.create_task(bench.retrieve(promised)), asyncio.create_task(bench.poll_session())]
    await asleep(bench, 2)
    bench.waiters.send_back()
    retrieved, polled = await asyncio.gather(*polls)
    assert (retrieved.status, polled.status) == (408, 200)


async def test_a_poll_that_waited_on_this_worker_finds_the_real_owner(bench: AppBench) -> None:
    """The submission here turned out to be a duplicate of one that runs elsewhere."""
    other = await AppBench(bench.server, OTHER_OWNER).open()
    await other.asample()
    await bench.sessions.require_alive(SESSION_ID)
    bench.store.gate = asyncio.Event()
    submission = asyncio.create_task(bench.asample())
    await until(lambda: bench.dispatcher.running(KEY) is not None)
    poll = asyncio.create_task(bench.retrieve(request_id()))
    await asleep(bench)
    bench.store.gate.set()
    await submission
    other.executor.finish(KEY, Ending(State.READY, b"theirs"))
    assert (await poll).body == b"theirs"
    await other.close()


# -- retrieve_futures -------------------------------------------------------------------------------------------------


async def test_a_session_poll_tells_what_ended_and_moves_its_cursor_once(bench: AppBench) -> None:
    finished, failed = await settled(bench), await settled(bench, FAILED, seq_id=2)
    first = (await bench.poll_session()).json
    assert [(entry["request_id"], entry["state"]) for entry in first["completions"]] == [
        (finished, "finished"),
        (failed, "failed"),
    ]
    assert first["completions"][0]["response_payload_uncompressed_size"] == len(TINY)
    again = (await bench.poll_session(cursor=first["cursor"], timeout_s=0.0)).json
    assert again == {"completions": [], "cursor": first["cursor"]}


async def test_a_session_poll_is_held_until_something_ends_anywhere(bench: AppBench) -> None:
    other = await AppBench(bench.server, OTHER_OWNER).open()
    await bench.asample()
    poll = asyncio.create_task(other.poll_session())
    await asleep(other)
    await until(lambda: bench.executor.started)
    bench.executor.finish(KEY)
    assert len((await poll).json["completions"]) == 1
    assert len(other.waiters) == 0


async def test_a_clones_poll_tells_only_of_its_own(bench: AppBench) -> None:
    """A10"""
    await settled(bench, seq_id=3 * CLONE_SPAN + 1)
    mine = await bench.poll_session(timeout_s=0.0, target={**TARGET_OF_CLONE, "cloned_sampler_id": 3})
    assert len(mine.json["completions"]) == 1
    assert (await bench.poll_session(timeout_s=0.0)).json["completions"] == []


TARGET_OF_CLONE = {"type": "sampling_session", "sampling_session_id": session().sampling_session_id}


async def test_an_idle_session_poll_ends_with_the_callers_cursor() -> None:
    bench = await AppBench(poll_timeout_s=0.01).open()
    await settled(bench)
    cursor = (await bench.poll_session()).json["cursor"]
    for timeout_s in (None, 0.0, -1.0, 3600.0):
        answered = await bench.poll_session(cursor=cursor, timeout_s=timeout_s)
        assert answered.json == {"completions": [], "cursor": cursor}


async def test_a_cursor_of_another_epoch_starts_anew(bench: AppBench) -> None:
    """C7"""
    promised = await settled(bench)
    answered = await bench.poll_session(cursor=(1 << 52) + 5)
    assert answered.json["completions"][0]["request_id"] == promised


async def test_what_died_together_with_the_log_is_told_as_failed_once(bench: AppBench) -> None:
    """C7, B11: nobody remembers these samples; their client must come and get its 410."""
    await bench.asample(seq_id=10)
    await bench.asample(seq_id=14)
    cursor = (1 << 52) + 5
    first = await bench.poll_session(cursor=cursor, timeout_s=0.0)
    told = {entry["request_id"]: entry["state"] for entry in first.json["completions"]}
    assert {request_id(number) for number in (6, 9, 11, 12, 13, 15)} <= set(told)
    assert set(told.values()) == {"failed"}
    assert not {request_id(10), request_id(14)} & set(told)
    assert (await bench.retrieve(request_id(12))).status == 410
    again = await bench.poll_session(cursor=first.json["cursor"], timeout_s=0.0)
    assert again.json == {"completions": [], "cursor": first.json["cursor"]}


async def test_what_is_lost_is_told_only_when_all_workers_have_told_what_they_run(
    bench: AppBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7"""
    monkeypatch.setattr(futures, "_STORE_RETRY_S", 0.001)
    await bench.asample(seq_id=10)
    bench.server.wipe()
    poll = asyncio.create_task(bench.poll_session(cursor=(1 << 52) + 5))
    before = bench.store.commands
    await until(lambda: bench.store.commands > before + 3)
    assert not poll.done()
    bench.clock.advance(REFILL_S)
    await bench.renew_lease()
    assert request_id(11) in {entry["request_id"] for entry in (await poll).json["completions"]}


@pytest.mark.parametrize("text", ["nonsense", "", "x" * 5000, session_of(KEY_A).sampling_session_id])
async def test_an_unknown_session_is_held_and_empty(text: str) -> None:
    """A7, A11: a 4xx would end the client for good, an answer at once would make it spin."""
    bench = await AppBench(poll_timeout_s=0.01, api_keys=KEYS).open()
    target = {"sampling_session_id": text}
    poll = asyncio.create_task(bench.poll_session(target=target, cursor=77, key=KEY_B))
    await asleep(bench)
    answered = await poll
    assert (answered.status, answered.json) == (200, {"completions": [], "cursor": 77})
    assert len(bench.waiters) == 0


async def test_the_hold_of_an_unknown_session_tells_nothing_of_a_real_one(keyed: AppBench) -> None:
    """A11: nor when something ends in the session whose inner name was given."""
    theirs = session_of(KEY_A)
    poll = asyncio.create_task(keyed.poll_session(target={"sampling_session_id": theirs.session_key}, key=KEY_B))
    await asleep(keyed)
    await settled(keyed, of=theirs, key=KEY_A)
    await asyncio.sleep(0)
    assert not poll.done()
    keyed.waiters.send_back()
    assert (await poll).json["completions"] == []


async def test_acknowledgements_count_only_for_the_polled_session(bench: AppBench) -> None:
    mine, _ = await settled(bench), await settled(bench, seq_id=2)
    other = await settled(bench, of=session(1), seq_id=2)
    answered = await bench.poll_session(retrieved_request_ids=[mine, other, "nonsense", request_id(77)])
    assert answered.status == 200
    await bench.clocks.flush()
    assert bench.left_s(KEY) == bench.settings.acked_ttl_s
    for untouched in (session().key(2), session(1).key(2)):
        assert bench.left_s(untouched) == bench.settings.undelivered_ttl_s
    assert bench.counters.acknowledged == 1


async def test_a_poll_with_acknowledgements_is_not_held(bench: AppBench) -> None:
    """SDK 0.36 sends its last ones with nothing pending."""
    finished = await settled(bench)
    cursor = (await bench.poll_session()).json["cursor"]
    answered = await bench.poll_session(cursor=cursor, retrieved_request_ids=[finished])
    assert answered.json == {"completions": [], "cursor": cursor}


async def test_a_client_that_leaves_a_session_poll_is_noticed(bench: AppBench) -> None:
    client = Connection()
    poll = asyncio.create_task(bench.poll_session(connection=client))
    await asleep(bench)
    client.lose(broken=True)
    await poll
    assert len(bench.waiters) == 0
    assert not any(bench.store._watched.values())


# -- cancel_future ----------------------------------------------------------------------------------------------------


async def test_a_cancel_ends_a_sample_that_runs_here(bench: AppBench) -> None:
    """D7"""
    promised = (await bench.asample()).json["request_id"]
    await until(lambda: bench.executor.started)
    assert (await bench.post("/cancel_future", {"request_id": promised})).status == 200
    answered = await bench.retrieve(promised)
    assert answered.status == 200
    assert answered.json["category"] == "user"
    assert bench.executor.interrupted == [KEY]


async def test_a_cancel_reaches_the_worker_that_runs_it(bench: AppBench) -> None:
    other = await AppBench(bench.server, OTHER_OWNER).open()
    promised = (await bench.asample()).json["request_id"]
    await until(lambda: bench.executor.started)
    assert (await other.post("/cancel_future", {"request_id": promised})).status == 200
    await bench.dispatcher.wait_idle()
    assert bench.state(KEY) is State.CANCELLED
    await other.close()


async def test_a_cancel_of_what_has_ended_changes_nothing(bench: AppBench) -> None:
    finished = await settled(bench, Ending(State.READY, b"result"))
    for name in (finished, request_id(99)):
        assert (await bench.post("/cancel_future", {"request_id": name})).status == 200
    assert (await bench.retrieve(finished)).body == b"result"


async def test_a_cancel_while_the_store_is_away_is_sent_again(bench: AppBench) -> None:
    bench.store.fail_before = AWAY
    assert (await bench.post("/cancel_future", {"request_id": request_id()})).status == 429


async def test_weights_info_tells_the_base_model_of_sampler_weights(bench: AppBench) -> None:
    """Where a training server is, it answers: see the tests of passing through."""
    answered = await bench.post("/weights_info", {"tinker_path": "tinker://run-1/sampler_weights/1"})
    assert (answered.status, answered.json) == (200, {"base_model": "sim/tiny", "is_lora": True})
    for path in ("tinker://run-2/sampler_weights/1", "tinker://run-1/weights/1", "nonsense"):
        refused = await bench.post("/weights_info", {"tinker_path": path})
        assert (refused.status, path in refused.json["detail"]) == (404, True)
    assert (await bench.post("/weights_info", {})).status == 400
