"""Sampling sessions and submissions, in process: what each client sees, whatever the store and other workers do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.core.faults import Fault, FaultClass
from shared.core.model import CLONE_SPAN
from tests.app_bench import API, KEY_A, KEY_B, AppBench, request_id, session_of
from tests.waiting import until
from tests.worker_bench import AWAY, OTHER_OWNER, SESSION_ID, session
from workers.api import sampling

KEY = session().key(1)


# -- sampling sessions ---------------------------------------------------------------------------------------------


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


# -- asample -------------------------------------------------------------------------------------------------------


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
