"""Measure the translation of requests to the upstream's, and of replies to the SDK's results."""

from __future__ import annotations

import json
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import orjson

from benchmarks import bodies
from benchmarks.baselines import json_lists
from benchmarks.turns import Case, Contender, Figure, Findings, Plan, WrongResult, each_time, measure
from shared.core.faults import Fault
from shared.core.model import SampleSpec, SamplingParams
from shared.wire import vllm
from shared.wire.sdk import result as proto
from shared.wire.sdk.calls import decode_retrieve_future
from shared.wire.sdk.sample import decode_sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shared.core.result import SampleResult

MODEL = "sim/tiny"
CONTEXT_TOKENS = 2**20
REPLY_TOKENS = (64, 16_384, 262_144)
PROMPT_TOKENS = (128, 4_096, 32_768)
_LIBRARIES = (("json", json.loads, json.dumps), ("orjson", orjson.loads, orjson.dumps))
_CLIENT_BODIES = 16
_SPEC = SampleSpec(b"10,11,12", 3, 1, SamplingParams())
_CALL = vllm.UpstreamCall(b"", 1, False)
_GENERATION = vllm.UpstreamCall(b"", 1, False, vllm.UpstreamProtocol.GENERATE)


async def decode(plan: Plan) -> Findings:
    """Measure a reply's body to packed sequences."""
    figures: list[Figure] = []
    for tokens in REPLY_TOKENS[: 2 if plan.quick else None]:
        figures += await measure(decode_case(tokens, plan.calls(_calls(tokens))), plan.rounds)
    return Findings(figures)


async def generations(plan: Plan) -> Findings:
    """Compare vLLM's two endpoints on the same replies and requests; `/v1/completions` is the baseline."""
    figures: list[Figure] = []
    for tokens in REPLY_TOKENS[: 2 if plan.quick else None]:
        figures += await measure(generation_case(tokens, plan.calls(_calls(tokens))), plan.rounds)
    for tokens in PROMPT_TOKENS:
        figures += await measure(generation_request_case(tokens, plan.calls(_calls(tokens))), plan.rounds)
    return Findings(figures)


async def encode(plan: Plan) -> Findings:
    """Measure packed sequences to the SDK's protobuf; the baseline writes lists as the SDK's JSON."""
    figures: list[Figure] = []
    for tokens in REPLY_TOKENS[: 2 if plan.quick else None]:
        figures += await measure(encode_case(tokens, plan.calls(_calls(tokens))), plan.rounds)
    return Findings(figures)


async def poll(plan: Plan) -> Findings:
    """Measure the parsing of the SDK's poll for a result."""
    return Findings(await measure(poll_case(plan.calls(_calls(64))), plan.rounds))


async def request(plan: Plan) -> Findings:
    """Measure the SDK's requests to the upstream's, with the requests of one client in turn."""
    figures: list[Figure] = []
    for tokens in PROMPT_TOKENS:
        figures += await measure(request_case(tokens, plan.calls(_calls(tokens))), plan.rounds)
    return Findings(figures)


def _calls(tokens: int) -> int:
    """Return a number of calls that takes a few tenths of a second."""
    return max(3, min(2_000, 1_000_000 // tokens))


def decode_case(tokens: int, calls: int) -> Case:
    body = bodies.reply_body(tokens)
    baselines = []
    for name, loads, _ in _LIBRARIES:
        way = partial(json_lists.decode_reply, body, loads)
        _require_same(_decoded(body), way())
        baselines.append(Contender(f"{name}, lists", each_time(way)))
    ours = Contender("gateway", each_time(partial(_decoded, body)))
    return Case(f"decode {tokens:,} tokens ({len(body):,} bytes)", calls, [ours, *baselines])


def generation_case(tokens: int, calls: int) -> Case:
    completion, generation = bodies.reply_body(tokens), bodies.generation_body(tokens)
    if _decoded(completion) != _decoded(generation, _GENERATION):
        raise WrongResult("the two endpoints decode the same reply differently")
    ours = Contender("generate", each_time(partial(_decoded, generation, _GENERATION)))
    theirs = Contender("completions", each_time(partial(_decoded, completion)))
    title = f"decode {tokens:,} tokens ({len(generation):,} and {len(completion):,} bytes)"
    return Case(title, calls, [ours, theirs])


def generation_request_case(tokens: int, calls: int) -> Case:
    body = bodies.asample_body(tokens)
    asked, other = json.loads(_built(body, vllm.UpstreamProtocol.GENERATE)), json.loads(_built(body))
    if asked["token_ids"] != other["prompt"]:
        raise WrongResult("the two endpoints get different prompts")
    ours = Contender("generate", each_time(partial(_built, body, vllm.UpstreamProtocol.GENERATE)))
    theirs = Contender("completions", each_time(partial(_built, body)))
    return Case(f"request of {tokens:,} prompt tokens, by protocol", calls, [ours, theirs])


def encode_case(tokens: int, calls: int) -> Case:
    body = bodies.reply_body(tokens)
    result, lists = _decoded(body), json_lists.decode_reply(body, orjson.loads)
    if proto.decode_sample_response(proto.encode_sample_response(result)) != result:
        raise WrongResult("the encoded result decodes to another one")
    ours = Contender("gateway", each_time(partial(proto.encode_sample_response, result)))
    baselines = [
        Contender(f"{name}, lists", each_time(partial(json_lists.encode_result, lists, dumps)))
        for name, _, dumps in _LIBRARIES
    ]
    return Case(f"encode {tokens:,} tokens", calls, [ours, *baselines])


def request_case(tokens: int, calls: int) -> Case:
    sent = [bodies.asample_body(tokens, number=number) for number in range(_CLIENT_BODIES)]
    baselines = []
    for name, loads, dumps in _LIBRARIES:
        way = partial(json_lists.build_request, model=MODEL, loads=loads, dumps=dumps)
        for body in sent:
            if not (theirs := json.loads(way(body))).items() <= (asked := json.loads(_built(body))).items():
                raise WrongResult(f"{name} asks for {theirs}, the gateway for {asked}")
        baselines.append(Contender(f"{name}, lists", each_time(_in_turn(way, sent))))
    ours = Contender("gateway", each_time(_in_turn(_built, sent)))
    return Case(f"request of {tokens:,} prompt tokens", calls, [ours, *baselines])


def poll_case(calls: int) -> Case:
    sent = [bodies.retrieve_future_body(number) for number in range(_CLIENT_BODIES)]
    baselines = []
    for name, loads, _ in _LIBRARIES:
        for body in sent:
            call = decode_retrieve_future(body)
            if loads(body) != {"request_id": call.request_id, "allow_metadata_only": call.allow_metadata_only}:
                raise WrongResult(f"{name} reads another poll than {call}")
        baselines.append(Contender(f"{name}, dict", each_time(_in_turn(loads, sent))))
    ours = Contender("gateway", each_time(_in_turn(decode_retrieve_future, sent)))
    return Case("poll for one result", calls, [ours, *baselines])


def _in_turn(way: Callable[[bytes], object], sent: Sequence[bytes]) -> Callable[[], object]:
    """Use the bodies in turn, since the same body again and again is easier for a processor than real clients are."""
    following = cycle(sent)
    return lambda: way(next(following))


def _decoded(body: bytes, call: vllm.UpstreamCall = _CALL) -> SampleResult:
    reply = vllm.decode_reply(call, _SPEC, body)
    if isinstance(reply, Fault):
        raise WrongResult(f"the reply is refused: {reply.message}")
    return vllm.combine(_SPEC, [reply])


def _built(body: bytes, protocol: vllm.UpstreamProtocol = vllm.UpstreamProtocol.COMPLETIONS) -> bytes:
    (call,) = vllm.plan_calls(decode_sample(body).spec, MODEL, CONTEXT_TOKENS, protocol)
    return call.body


def _require_same(result: SampleResult, sequences: list[json_lists.Sequence]) -> None:
    for ours, theirs in zip(result.sequences, sequences, strict=True):
        same_tokens = ours.tokens == np.asarray(theirs.tokens, "<i4").tobytes()
        if not same_tokens or ours.logprobs != np.asarray(theirs.logprobs, "<f4").tobytes():
            raise WrongResult("two ways to read one reply disagree")
