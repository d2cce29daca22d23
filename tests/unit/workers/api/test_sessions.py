"""Configuration, sessions, health, and what no route takes: what each client sees of it."""

from __future__ import annotations

import pytest

from shared.core.lifecycle import State
from shared.store.contract import SessionState
from tests.app_bench import API, KEY_A, KEY_B, AppBench, settled
from tests.waiting import until
from tests.worker_bench import AWAY, OTHER_OWNER, SESSION_ID, session

# -- configuration, sessions, and all that is around ---------------------------------------------------------------


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


# -- cancel_future -------------------------------------------------------------------------------------------------


async def test_weights_info_tells_the_base_model_of_sampler_weights(bench: AppBench) -> None:
    """Where a training server is, it answers: see the tests of passing through."""
    answered = await bench.post("/weights_info", {"tinker_path": "tinker://run-1/sampler_weights/1"})
    assert (answered.status, answered.json) == (200, {"base_model": "sim/tiny", "is_lora": True})
    for path in ("tinker://run-2/sampler_weights/1", "tinker://run-1/weights/1", "nonsense"):
        refused = await bench.post("/weights_info", {"tinker_path": path})
        assert (refused.status, path in refused.json["detail"]) == (404, True)
    assert (await bench.post("/weights_info", {})).status == 400
