"""`gateway check`'s and the supervisor's questions, against a small upstream on a real socket."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.admin.report import RAW_LOGPROBS
from gateway.commands.check import all_findings
from gateway.commands.findings import Verdict
from gateway.supervision.logprobs_watch import USUAL_PACE, ProbePace, follow_upstreams, watch_logprobs
from gateway.supervision.upstream_probe import (
    NoAnswer,
    OfferedModel,
    ProbeError,
    offered_models,
    probe_scaling,
    session,
    training_status,
)
from shared.channel import UpstreamStatus
from shared.config import ModelName, Settings
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LOGITS = {101: 2.0, 102: 0.5, 103: -1.0, 104: -1.5}
MODELS = {"data": [{"id": "m", "max_model_len": 128}, {"id": "lora", "parent": "m"}]}


class Upstream:
    """Four tokens, in the shape of vLLM. `top`: it names the top logprobs, not only the sampled one."""

    def __init__(self, *, processed: bool, top: bool = True, models: Any = MODELS) -> None:
        self.processed = processed
        self.top = top
        self.models = models
        self.authorization: str | None = None

    async def offered(self, request: web.Request) -> web.Response:
        self.authorization = request.headers.get("Authorization")
        return web.json_response(self.models)

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        scale = body["temperature"] if self.processed else 1.0
        norm = math.log(sum(math.exp(z / scale) for z in LOGITS.values()))
        logprobs = {token: z / scale - norm for token, z in LOGITS.items()}
        sampled = list(LOGITS)[(body["seed"] + int(body["temperature"])) % 4]
        named = logprobs if self.top else {sampled: logprobs[sampled]}
        top = {f"token_id:{token}": value for token, value in named.items()}
        choice = {"token_logprobs": [logprobs[sampled]], "top_logprobs": [top]}
        return web.json_response({"choices": [{"token_ids": [sampled], "logprobs": choice}]})


@asynccontextmanager
async def serving(upstream: Upstream) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/v1/models", upstream.offered)
    app.router.add_post("/v1/completions", upstream.complete)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


@pytest.mark.parametrize("top", [True, False])
@pytest.mark.parametrize("processed", [True, False])
async def test_scaling_is_found_out(processed: bool, top: bool) -> None:
    """D15, also where only the sampled token is named."""
    async with serving(Upstream(processed=processed, top=top)) as url, session(None) as http:
        assert await probe_scaling(http, url, "m") is processed


@pytest.mark.parametrize(("key", "status"), [("tml-t", 200), ("tml-other", 401), (None, 401)])
async def test_a_training_server_is_asked_with_the_operators_key(key: str | None, status: int) -> None:
    async def capabilities(request: web.Request) -> web.Response:
        return web.json_response({}, status=200 if request.headers.get("X-API-Key") == "tml-t" else 401)

    app = web.Application()
    app.router.add_get("/base/api/v1/get_server_capabilities", capabilities)
    async with TestServer(app) as server, session(None) as http:
        assert await training_status(http, str(server.make_url("/base")), key) == status


async def test_a_training_server_that_is_not_there() -> None:
    async with session(None) as http:
        with pytest.raises(NoAnswer, match="refused"):
            await training_status(http, "http://127.0.0.1:9", None)


async def test_models_are_listed_with_the_key() -> None:
    upstream = Upstream(processed=True)
    async with serving(upstream) as url, session("k") as http:
        assert await offered_models(http, url) == [OfferedModel("m", 128, None), OfferedModel("lora", None, "m")]
    assert upstream.authorization == "Bearer k"


@pytest.mark.parametrize("models", [{"data": 3}, {"data": [{}]}, {}, [], "x"])
async def test_an_answer_unlike_vllm_is_an_error(models: Any) -> None:
    async with serving(Upstream(processed=True, models=models)) as url, session(None) as http:
        with pytest.raises(ProbeError, match="did not answer a"):
            await offered_models(http, url)


async def test_a_refused_connection_is_an_error() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        async with session(None) as http:
            with pytest.raises(ProbeError, match="cannot connect: Connection refused"):
                await offered_models(http, f"http://127.0.0.1:{closed.getsockname()[1]}")


async def test_an_error_status_is_passed_on() -> None:
    async with serving(Upstream(processed=True)) as url, session(None) as http:
        with pytest.raises(ProbeError, match="answered 404"):
            await offered_models(http, url + "/elsewhere")


@asynccontextmanager
async def watching(
    known: dict[str, bool | None], *models: ModelName, pace: ProbePace = USUAL_PACE
) -> AsyncIterator[None]:
    task = asyncio.create_task(watch_logprobs(Settings(models=models), known, pace))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_supervisor_asks_until_it_knows() -> None:
    async with serving(Upstream(processed=False)) as raw, serving(Upstream(processed=True)) as fine:
        known: dict[str, bool | None] = {raw: None, fine: None}
        async with watching(known):
            await until(lambda: known == {raw: False, fine: True})


class StrictUpstream(Upstream):
    """Lists one model, and generates with no other, as vLLM does."""

    def __init__(self, model: str) -> None:
        super().__init__(processed=True, models={"data": [{"id": model}]})
        self.model = model

    async def complete(self, request: web.Request) -> web.Response:
        known = (await request.json())["model"] == self.model
        return await super().complete(request) if known else web.Response(status=404)


FAST = ProbePace(again_s=0.001, look_s=0.001)
A, B, C = (ModelName(name, name) for name in "abc")


async def test_each_upstream_is_asked_for_a_model_of_its_own() -> None:
    async with serving(StrictUpstream("a")) as first, serving(StrictUpstream("b")) as second:
        known: dict[str, bool | None] = {first: None, second: None}
        async with watching(known, A, B):
            await until(lambda: known == {first: True, second: True})


async def test_a_model_that_no_upstream_lists_is_logged_once_when_all_have_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "gateway.logprobs")
    late = LateUpstream(processed=True, models={"data": []})
    async with serving(StrictUpstream("a")) as first, serving(late) as second:
        async with watching({first: None, second: None}, A, ModelName("mine", "c"), pace=FAST):
            await until(lambda: late.asked > 6)
    logged = [record for record in caplog.records if "lists" in record.message]
    assert [vars(record)["model"] for record in logged] == ["mine=c"]
    answers = [record.message for record in caplog.records].index("an upstream works now")
    assert caplog.records.index(logged[0]) > answers


@pytest.mark.slow
@pytest.mark.parametrize(("wanted", "failures"), [((A, B), []), ((A, B, C), ["--model c"])], ids=["each", "none"])
async def test_one_upstream_that_offers_a_model_is_enough(wanted: tuple[ModelName, ...], failures: list[str]) -> None:
    async with serving(StrictUpstream("a")) as first, serving(StrictUpstream("b")) as second:
        settings = Settings(upstreams=(first, second), models=wanted, port=0, admin_port=0)
        found = await all_findings(settings)
    assert [finding.subject for finding in found if finding.verdict is Verdict.FAILURE] == failures
    probed = [finding.subject for finding in found if finding.subject.startswith("logprobs of")]
    assert probed == [f"logprobs of a at {first}", f"logprobs of b at {second}"]


async def test_an_upstream_that_is_published_later_is_asked_and_one_that_left_is_forgotten() -> None:
    known: dict[str, bool | None] = {}
    async with serving(Upstream(processed=False)) as url, watching(known, pace=FAST):
        follow_upstreams(known, [UpstreamStatus(url, "up", 0, 0), UpstreamStatus("http://old", "leaving", 1, 0)])
        assert known == {url: None}
        await until(lambda: known == {url: False})
        follow_upstreams(known, [])
        assert known == {}


class BusyUpstream(Upstream):
    """Answers every other time."""

    asked = 0

    async def offered(self, request: web.Request) -> web.Response:
        self.asked += 1
        return await super().offered(request) if self.asked % 2 else web.Response(status=503)


async def test_a_raw_upstream_is_probed_until_it_is_fixed_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """D15"""
    caplog.set_level(logging.INFO, "gateway.logprobs")
    upstream = BusyUpstream(processed=False)
    async with serving(upstream) as url:
        known: dict[str, bool | None] = {url: None}
        async with watching(known, pace=FAST):
            await until(lambda: known[url] is False)
            await until(lambda: known[url] is None or upstream.asked > 6)
            assert known[url] is False, "as it was while it does not answer"
            upstream.processed = True
            await until(lambda: known[url])
    logged = [record.message for record in caplog.records if "temperature" in record.message]
    assert logged == [RAW_LOGPROBS, "sampled logprobs use the temperature now"]


async def test_an_upstream_that_becomes_raw_under_the_same_url_is_found(caplog: pytest.LogCaptureFixture) -> None:
    """D15: a server that is started anew without the flag."""
    upstream = Upstream(processed=True)
    async with serving(upstream) as url:
        known: dict[str, bool | None] = {url: None}
        async with watching(known, pace=ProbePace(still_s=0.001, look_s=0.001)):
            await until(lambda: known[url])
            upstream.processed = False
            await until(lambda: known[url] is False)
    assert caplog.messages == [RAW_LOGPROBS]


class LateUpstream(Upstream):
    """Loads its model until it was asked three times."""

    asked = 0

    async def offered(self, request: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(status=503) if self.asked <= 3 else await super().offered(request)


async def test_an_upstream_that_comes_late_is_logged_once_and_again_when_it_is_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "gateway.logprobs")
    async with serving(LateUpstream(processed=True)) as url:
        known: dict[str, bool | None] = {url: None}
        async with watching(known, pace=FAST):
            await until(lambda: known[url])
    assert caplog.messages == ["an upstream does not work yet", "an upstream works now"]


async def test_one_that_was_right_is_asked_soon_while_it_is_silent() -> None:
    """What does not answer may be starting anew, with other flags."""
    async with serving(LateUpstream(processed=False)) as url:
        known: dict[str, bool | None] = {url: True}
        async with watching(known, pace=FAST):
            await until(lambda: known[url] is False)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "scales"), [("processed_logprobs", True), ("raw_logprobs", False)])
async def test_the_simulated_vllm_answers_a_probe_and_does_not_count_it(mode: str, scales: bool) -> None:
    """D15; a probe must not spend a scripted fault, wait at a barrier, or look like a second execution."""
    command = [sys.executable, "-m", "gateway", "simulate-vllm", "--port", "0", "--mode", "barrier"]
    simulator = await asyncio.create_subprocess_exec(*command, "--logprobs-mode", mode, stdout=subprocess.PIPE)
    try:
        assert simulator.stdout is not None
        line = (await simulator.stdout.readline()).decode()
        url = next(word for word in line.split() if word.startswith("http://"))
        async with session(None) as http:
            assert await probe_scaling(http, url, "sim/tiny") is scales
            async with http.get(url + "/_sim/stats") as reply:
                stats = await reply.json()
        assert stats["executions"] == stats["received"] == 0
    finally:
        simulator.terminate()
        await simulator.wait()
