"""The simulated vLLM over real sockets, on the test's own loop: what it samples, its connections, how it waits."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from gateway.simulator.config import SimulatorConfig
from gateway.simulator.simulator import Simulator
from gateway.simulator.tokens import find_seed, sampled
from tests.integration.simulator_bench import ADAPTER, DATA, LOAD, Bench, Client, configured, running_bench

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """Configured by the indirect parameter, if there is one."""
    async with running_bench(getattr(request, "param", {})) as made:
        yield made


# -- sampling ------------------------------------------------------------------------------------------------------


async def test_a_completion_is_what_the_model_function_says(bench: Bench) -> None:
    client = await bench.client()
    document = await client.completion("gw-123", seed=7)
    (choice,) = document["choices"]
    tokens, logprobs = sampled("sim/tiny", [10, 11, 12], 7, 4)
    assert document["id"] == "cmpl-gw-123"
    assert choice["token_ids"] == tokens.tolist()
    assert np.array(choice["logprobs"]["token_logprobs"], np.float32).tobytes() == logprobs.tobytes()


async def test_a_seed_and_n_give_reproducible_choices(bench: Bench) -> None:
    """D5"""
    client = await bench.client()
    first = await client.completion(seed=7, n=4)
    again = await client.completion(seed=7, n=4)
    drawn = [choice["token_ids"] for choice in first["choices"]]
    assert drawn == [choice["token_ids"] for choice in again["choices"]]
    assert drawn == [sampled("sim/tiny", [10, 11, 12], 7 + index, 4)[0].tolist() for index in range(4)]


async def test_without_a_seed_samples_differ_and_can_still_be_checked(bench: Bench) -> None:
    client = await bench.client()
    seeds = set()
    for _ in range(4):
        document = await client.completion()
        seeds.add(find_seed("sim/tiny", [10, 11, 12], document["choices"][0]["token_ids"]))
    assert None not in seeds
    assert len(seeds) > 1


@configured(raw_logprobs=True)
async def test_raw_logprobs_ignore_the_temperature(bench: Bench) -> None:
    """D15"""
    client = await bench.client()
    cool, warm = [(await client.completion(seed=1, temperature=t))["choices"][0]["logprobs"] for t in (0.5, 1.0)]
    assert cool["token_logprobs"] == warm["token_logprobs"]


async def test_refusals_are_answered_and_execute_nothing(bench: Bench) -> None:
    client = await bench.client()
    client.ask(model="nope")
    status, body = await client.reply()
    error = json.loads(body)["error"]
    assert (status, error["message"]) == (404, "The model `nope` does not exist. Valid aliases: sim/tiny.")
    client.send("POST", "/v1/completions", b'{"model":')
    assert (await client.reply())[0] == 400
    assert bench.simulator.stats()["received"] == 2
    assert bench.simulator.stats()["executions"] == 0


async def test_generate_draws_the_same_tokens(bench: Bench) -> None:
    client = await bench.client()
    asked = {"model": "sim/tiny", "token_ids": [10, 11, 12], "sampling_params": {"seed": 7, "max_tokens": 4}}
    status, document = await client.call("POST", "/inference/v1/generate", asked)
    assert status == 200
    assert document["choices"][0]["token_ids"] == sampled("sim/tiny", [10, 11, 12], 7, 4)[0].tolist()


async def test_a_generation_of_nothing_is_invalid(bench: Bench) -> None:
    client = await bench.client()
    status, document = await client.call("POST", "/inference/v1/generate", {})
    assert (status, document["error"]["param"]) == (400, "body.token_ids")


@configured(scale_out=False)
async def test_generations_can_be_off(bench: Bench) -> None:
    client = await bench.client()
    assert (await client.call("POST", "/inference/v1/generate", {}))[0] == 403
    assert bench.simulator.stats()["received"] == 0


async def test_pipelined_requests_are_answered_in_order(bench: Bench) -> None:
    bench.simulator.set_faults([{"kind": "delay", "delay_s": 0.05, "next": 1}])
    client = await bench.client()
    for seed in (1, 2, 3):
        client.ask(f"id-{seed}", seed=seed)
    ids = [json.loads((await client.reply())[1])["id"] for _ in range(3)]
    assert ids == ["cmpl-id-1", "cmpl-id-2", "cmpl-id-3"]


# -- the other paths -----------------------------------------------------------------------------------------------


async def test_what_health_checks_and_routers_ask(bench: Bench) -> None:
    client = await bench.client()
    assert await client.call("GET", "/health") == (200, "")
    assert await client.call("GET", "/ping") == (200, "")
    assert await client.call("GET", "/version") == (200, {"version": "0.32.0"})
    assert await client.call("POST", "/v1/nope", {}) == (404, {"detail": "Not Found"})
    status, models = await client.call("GET", "/v1/models")
    assert (status, models["data"][0]["id"], models["data"][0]["max_model_len"]) == (200, "sim/tiny", 131_072)
    status, metrics = await client.call("GET", "/metrics")
    assert status == 200
    assert 'vllm:num_requests_running{engine="0",model_name="sim/tiny"} 0.0' in metrics


async def test_adapters_come_and_go(bench: Bench) -> None:
    client = await bench.client()
    adapter = ADAPTER
    load, unload = ("POST", LOAD), ("POST", "/v1/unload_lora_adapter")
    client.ask(model="a1")
    assert (await client.reply())[0] == 404
    assert await client.call(*load, adapter) == (200, "Success: LoRA adapter 'a1' added successfully.")
    assert (await client.completion(model="a1", seed=1))["choices"][0]["token_ids"] == sampled(
        "a1", [10, 11, 12], 1, 4
    )[0].tolist()
    status, refused = await client.call(*load, adapter)
    assert (status, refused["error"]["type"]) == (400, "InvalidUserInput")
    assert (await client.call(*load, {**adapter, "load_inplace": True}))[0] == 200
    _, models = await client.call("GET", "/v1/models")
    assert [(card["id"], card["parent"]) for card in models["data"]] == [("sim/tiny", None), ("a1", "sim/tiny")]
    assert (await client.call(*load, {"lora_name": "sim/tiny"}))[0] == 400
    assert (await client.call(*load, {}))[0] == 400
    assert (await client.call(*unload, adapter))[0] == 200
    assert (await client.call(*unload, adapter))[0] == 404


@pytest.mark.parametrize("name", ["24_load_missing_path", "24_load_a1", "24_load_a1_dup", "24_unload_unknown"])
@configured(lora="files")
async def test_adapters_are_answered_for_as_by_a_real_vllm(bench: Bench, tmp_path: Path, name: str) -> None:
    told = json.loads((DATA / f"{name}.json").read_text())
    asked = json.loads(told["request"]["body"])
    (tmp_path / "a1").mkdir()
    (tmp_path / "a1" / "adapter_config.json").touch()
    asked["lora_path"] = asked.get("lora_path", "").replace("/models", str(tmp_path))
    client = await bench.client()
    loaded_before = name == "24_load_a1_dup"
    if loaded_before:
        await client.call("POST", told["request"]["path"], asked)
    status, body = await client.call("POST", told["request"]["path"], asked)
    recorded = told["response"]["body"]
    assert status == told["response"]["status"]
    assert body == (json.loads(recorded.replace("<path>", asked["lora_path"])) if recorded[0] == "{" else recorded)
    assert bench.simulator.stats()["adapter_loads"] == (told["request"]["path"] == LOAD) + loaded_before


@configured(lora="off")
async def test_without_lora_there_is_no_such_path(bench: Bench) -> None:
    client = await bench.client()
    assert await client.call("POST", LOAD, ADAPTER) == (404, {"detail": "Not Found"})


async def test_loading_misbehaves_where_a_rule_names_its_path(bench: Bench) -> None:
    client = await bench.client()
    load, adapter = ("POST", LOAD), ADAPTER
    bench.simulator.set_faults(
        [
            {"kind": "status", "status": 503, "next": 1},
            {"kind": "status", "status": 500, "path": load[1], "model": "a1", "next": 1},
        ]
    )
    assert (await client.call(*load, adapter | {"lora_name": "other"}))[0] == 200
    assert (await client.call(*load, adapter))[0] == 500
    assert (await client.call(*load, adapter))[0] == 200
    bench.simulator.set_faults([{"kind": "hold", "path": load[1]}])
    client.send(*load, json.dumps(adapter | {"lora_name": "a2"}).encode())
    other = await bench.client()
    await bench.until("the fourth load", lambda stats: stats["adapter_loads"] == 4)
    _, models = await other.call("GET", "/v1/models")
    assert [card["id"] for card in models["data"]] == ["sim/tiny", "other", "a1"]
    await other.call("POST", "/_sim/release")
    assert (await client.reply())[0] == 200


# -- connections ---------------------------------------------------------------------------------------------------


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    async with Simulator(SimulatorConfig(keep_alive_s=0.05, mode="latency", gen_seconds=0.2)) as simulator:
        bench = Bench(simulator)
        client = await bench.client()
        await client.completion()
        assert await client.reader.read() == b""
        await bench.close()


@pytest.mark.parametrize("half", [False, True], ids=["closed", "half-closed"])
async def test_a_client_that_goes_away_aborts_its_generation(bench: Bench, half: bool) -> None:
    """D7: what the gateway's cancellation relies on."""
    bench.simulator.set_faults([{"kind": "hang"}])
    client = await bench.client()
    client.ask("s-a1")
    await bench.until("a generation", lambda stats: stats["in_flight"] == 1)
    if half:
        client.writer.write_eof()
    else:
        client.writer.close()
    stats = await bench.until("an abort", lambda stats: stats["aborted"] == 1)
    assert (stats["in_flight"], stats["completed"], stats["executions"]) == (0, 0, 1)


async def test_addresses_and_repeated_samples_are_counted(bench: Bench) -> None:
    first, second = await bench.client("127.0.0.2"), await bench.client("127.0.0.3")
    await first.completion("gwss-x:1-a1")
    await second.completion("gwss-x:1-a2")
    await second.completion("gwss-x:2-a1")
    status, stats = await first.call("GET", "/_sim/stats")
    assert status == 200
    assert stats["by_source_ip"] == {"127.0.0.2": 1, "127.0.0.3": 2}
    assert stats["by_request_id"] == {"gwss-x:1": 2}
    assert (stats["executions"], stats["completed"], stats["concurrent_duplicates"]) == (3, 3, 0)
    assert stats["connections"] == 2
    await first.call("POST", "/_sim/reset")
    assert bench.simulator.stats()["received"] == 0


async def test_the_bytes_of_all_connections_are_counted(bench: Bench) -> None:
    first, second = await bench.client(), await bench.client()
    await first.completion(seed=7)
    before = bench.simulator.stats()
    await second.completion(seed=7)
    await second.completion(seed=7)
    after = bench.simulator.stats()
    one_each = before["received_bytes"], before["sent_bytes"]
    assert min(one_each) > 0
    assert (after["received_bytes"], after["sent_bytes"]) == tuple(3 * count for count in one_each)


async def test_one_sample_twice_at_a_time_is_counted(bench: Bench) -> None:
    bench.simulator.set_faults([{"kind": "hold"}])
    first, second = await bench.client(), await bench.client()
    first.ask("s-a1")
    second.ask("s-a2")
    await bench.until("both", lambda stats: stats["in_flight"] == 2)
    assert bench.simulator.stats()["concurrent_duplicates"] == 1
    assert (await (await bench.client()).call("POST", "/_sim/release"))[0] == 200
    assert [(await client.reply())[0] for client in (first, second)] == [200, 200]


# -- modes ---------------------------------------------------------------------------------------------------------


# Long enough for the second to come while the first one runs.
@configured(mode="latency", gen_seconds=0.3, max_num_seqs=2)
async def test_latency_runs_so_many_at_once_first_come_first_served(bench: Bench) -> None:
    done: list[int] = []

    async def one(index: int, client: Client) -> None:
        await client.completion()
        done.append(index)

    async with asyncio.TaskGroup() as group:
        for index in range(5):
            group.create_task(one(index, await bench.client()))
            await bench.until("it came", lambda stats, count=index + 1: stats["received"] == count)  # type: ignore[misc]
    stats = bench.simulator.stats()
    assert (stats["peak_in_flight"], stats["completed"], stats["waiting"]) == (2, 5, 0)
    assert [{*done[:2]}, {*done[2:4]}, {*done[4:]}] == [{0, 1}, {2, 3}, {4}]


@configured(mode="latency", gen_seconds=1000.0, max_num_seqs=1)
async def test_who_leaves_the_queue_was_never_executed(bench: Bench) -> None:
    running, waiting = await bench.client(), await bench.client()
    running.ask()
    await bench.until("one runs", lambda stats: stats["in_flight"] == 1)
    waiting.ask()
    await bench.until("one waits", lambda stats: stats["waiting"] == 1)
    waiting.writer.close()
    stats = await bench.until("nobody waits", lambda stats: stats["waiting"] == 0)
    assert (stats["executions"], stats["aborted"]) == (1, 0)


@configured(mode="barrier", barrier_idle_s=1000.0)
async def test_a_barrier_holds_all_until_it_is_released(bench: Bench) -> None:
    clients = [await bench.client() for _ in range(3)]
    for client in clients:
        client.ask()
    stats = await bench.until("all three", lambda stats: stats["in_flight"] == 3)
    assert stats["completed"] == 0
    await (await bench.client()).call("POST", "/_sim/release")
    assert [(await client.reply())[0] for client in clients] == [200] * 3
    assert bench.simulator.stats()["peak_in_flight"] == 3


@configured(mode="barrier", barrier_idle_s=1000.0, barrier_size=3)
async def test_a_barrier_of_a_size_opens_for_so_many_that_are_still_there(bench: Bench) -> None:
    clients = [await bench.client() for _ in range(4)]
    for number, client in enumerate(clients[:2], 1):
        client.ask(f"s{number}-a1")
    await bench.until("two", lambda stats: stats["in_flight"] == 2)
    clients[0].writer.close()
    await bench.until("one has left", lambda stats: stats["aborted"] == 1)
    clients[2].ask("s3-a1")
    await bench.until("two again", lambda stats: stats["in_flight"] == 2)
    assert bench.simulator.stats()["completed"] == 0
    clients[3].ask("s4-a1")
    assert [(await client.reply())[0] for client in clients[1:]] == [200, 200, 200]


@configured(mode="barrier", barrier_idle_s=0.02)
async def test_a_barrier_opens_by_itself_when_nobody_comes_any_more(bench: Bench) -> None:
    await (await bench.client()).completion()
