"""Samples by either endpoint of an upstream: how they end, and when the other one is asked."""

from __future__ import annotations

import json
import logging

import pytest

from shared.core.faults import Fault, classify_reply, too_large
from shared.core.lifecycle import State
from shared.core.model import SamplingParams
from shared.core.upstream_protocol import ProtocolChoice, UpstreamProtocol
from tests.execution_bench import BUSY, RESET, Bench, faults_of
from tests.worker_bench import spec

GENERATE = "/inference/v1/generate"
LONG_STOP = SamplingParams(max_tokens=4, stop=("a", "b", "c", "d", "e"))


async def test_a_generation_ends_as_a_completion_does() -> None:
    """D15: prompt logprobs of several sequences are asked for apart, once, by either protocol."""
    ends = []
    for choice in (ProtocolChoice.COMPLETIONS, ProtocolChoice.GENERATE):
        bench = Bench(BUSY, RESET, protocol=choice)
        ends.append(await bench.execute(spec(n=2, prompt_logprobs=True)))
        assert bench.attempts == ["a1", "a2", "a3", "a3"]
        assert (bench.counters.tokens_sampled, bench.counters.reexecutions) == (8, 1)
    assert bench.forwarder.paths == [GENERATE] * 4
    assert ends[0] == ends[1]
    assert ends[0][0] is State.READY


async def test_an_endpoint_that_is_gone_sends_the_sample_to_the_other() -> None:
    missing = classify_reply(403, b"", {}, UpstreamProtocol.GENERATE)
    bench = Bench(missing, protocol=ProtocolChoice.AUTO)
    upstream = bench.pool.choose("tiny")
    await bench.pool.protocols.learn(upstream)
    state, _ = await bench.execute()
    assert state is State.READY
    assert bench.forwarder.paths == [GENERATE, "/v1/completions"]
    assert (bench.counters.faults_never_executed, bench.counters.reexecutions) == (1, 0)
    assert not upstream.failures


async def test_an_endpoint_that_is_not_there_where_it_was_chosen_is_final() -> None:
    bench = Bench(classify_reply(404, b"", {}, UpstreamProtocol.GENERATE), protocol=ProtocolChoice.GENERATE)
    state, payload = await bench.execute()
    assert state is State.FAILED
    assert json.loads(payload)["category"] == "server"
    assert "--enable-scale-out" in json.loads(payload)["error"]


async def test_what_nobody_can_be_asked_is_never_sent() -> None:
    """It was taken while an upstream might have had the endpoint, and then none had."""
    bench = Bench()
    state, payload = await bench.execute(spec(params=LONG_STOP))
    assert state is State.FAILED
    assert json.loads(payload)["category"] == "user"
    assert "--upstream-protocol" in json.loads(payload)["error"]
    assert not bench.forwarder.asked
    assert faults_of(bench) == {}


async def test_a_long_stop_list_is_sent_whole() -> None:
    bench = Bench(protocol=ProtocolChoice.GENERATE)
    assert (await bench.execute(spec(params=LONG_STOP)))[0] is State.READY
    assert bench.forwarder.asked[0]["sampling_params"]["stop"] == ["a", "b", "c", "d", "e"]


async def test_weights_that_change_under_a_generation_are_counted_and_logged_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(protocol=ProtocolChoice.GENERATE)
    bench.forwarder.versions = ("step-7", "step-8")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            state, _ = await bench.execute(spec(n=2))
            assert state is State.READY
        bench.clock.advance(60.0)
        bench.forwarder.versions = ("step-8", "step-9")
        await bench.execute(spec(n=1))
    assert bench.counters.mixed_weights == 7
    lines = [vars(record) for record in caplog.records if "weights changed" in record.message]
    assert [(line["versions"], line["sequences"], line["samples_not_told"]) for line in lines] == [
        (["step-7", "step-8"], 2, 0),
        (["step-8", "step-9"], 1, 2),
    ]
    assert {line["upstream"] for line in lines} == {"http://a"}
    assert {line["request_id"] for line in lines} == {bench.sample.request_id}


TOO_MANY = classify_reply(400, b'{"error":{"message":"n must be at most 256"}}', {}, UpstreamProtocol.GENERATE)


@pytest.mark.parametrize("second", [None, classify_reply(400, b'{"error":{"message":"n is wrong"}}', {})])
async def test_what_only_generations_refuse_is_asked_by_the_other_endpoint(second: Fault | None) -> None:
    """Found out, not chosen: nobody has asked for the narrower bounds. The second word is the last."""
    bench = Bench(TOO_MANY, second, protocol=ProtocolChoice.AUTO)
    await bench.pool.protocols.learn(bench.pool.choose("tiny"))
    state, payload = await bench.execute(spec(n=3))
    assert state is (State.READY if second is None else State.FAILED)
    assert bench.forwarder.paths == [GENERATE, "/v1/completions"]
    assert bench.attempts == ["a1", "a1"]
    assert (bench.counters.attempts, bench.counters.faults_refused) == (2, 1 if second is None else 2)
    assert not bench.slept_s
    if second is not None:
        assert json.loads(payload) == {"error": "upstream answered 400: n is wrong", "category": "user"}


@pytest.mark.parametrize(
    ("choice", "params", "fault"),
    [
        (ProtocolChoice.GENERATE, SamplingParams(max_tokens=4), TOO_MANY),
        (ProtocolChoice.AUTO, LONG_STOP, TOO_MANY),
        # Larger than any result may be: it has run.
        (ProtocolChoice.AUTO, SamplingParams(max_tokens=4), too_large()),
        (ProtocolChoice.AUTO, SamplingParams(max_tokens=4), classify_reply(413, b"", {}, UpstreamProtocol.GENERATE)),
    ],
)
async def test_other_refusals_of_generations_are_final(
    choice: ProtocolChoice, params: SamplingParams, fault: Fault
) -> None:
    bench = Bench(fault, protocol=choice)
    await bench.pool.protocols.learn(bench.pool.choose("tiny"))
    assert (await bench.execute(spec(params=params)))[0] is State.FAILED
    assert bench.forwarder.paths == [GENERATE]
