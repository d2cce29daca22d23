"""Flags override presets, presets override defaults, and values out of range are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.bench.driver import make_plans, source_ip, total_progress
from gateway.bench.installation import admin_url_in, gateway_command, kept_in, simulator_command, upstream_connections
from gateway.bench.load.messages import Progress
from gateway.bench.scenario import PRESETS, STEADY, Scenario, resolve, resolve_all, shares
from gateway.serve import ready_line
from shared.config import Settings
from shared.core.errors import ConfigError
from shared.core.ports import DEFAULT_RANGE


def test_a_flag_wins_over_the_preset_and_the_preset_over_the_default() -> None:
    scenario = resolve("queue", {"samples": 100})
    assert (scenario.samples, scenario.max_num_seqs, scenario.workers) == (100, 2_048, Scenario().workers)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_makes_a_run(preset: str) -> None:
    scenario = resolve(preset, {"seed": 1})
    assert scenario.concurrency <= scenario.samples


@pytest.mark.parametrize(
    ("preset", "samples", "at_once", "prompt_tokens", "max_tokens"),
    [
        ("burst", 2_048, None, 128, 64),
        ("queue", 32_768, 2_048, 128, 64),
        ("rollout", 131_072, 2_048, 128, 64),
        ("long", 256, None, 64, 32_768),
        ("prompts", 512, None, 32_768, 32),
    ],
)
def test_presets_are_what_the_documents_say(
    preset: str, samples: int, at_once: int | None, prompt_tokens: int, max_tokens: int
) -> None:
    run = resolve(preset, {"seed": 1})
    assert (run.samples, run.max_num_seqs, run.prompt_tokens, run.max_tokens) == (
        *(samples, at_once, prompt_tokens, max_tokens),
    )
    # All of the small ones are outstanding at once; in those that queue, each takes 5 s.
    assert run.concurrency == samples or preset in ("long", "prompts")
    assert run.gen_seconds == 5.0 or at_once is None


def test_few_samples_are_all_in_flight_at_once() -> None:
    assert resolve(None, {"samples": 5}).concurrency == 5
    assert resolve(None, {"samples": 50_000}).concurrency == 2_048


def test_one_number_of_samples_in_flight_or_none_is_one_run() -> None:
    assert resolve_all("queue", {"samples": 100}, []) == [resolve("queue", {"samples": 100})]
    assert resolve_all(None, {}, [64]) == [resolve(None, {"concurrency": 64})]


def test_each_of_several_has_many_times_as_many_samples_as_it_has_in_flight() -> None:
    runs = resolve_all(None, {"seed": 3}, [64, 512])
    assert [(run.concurrency, run.samples, run.seed) for run in runs] == [(64, 64 * STEADY, 3), (512, 512 * STEADY, 3)]


def test_the_number_of_samples_that_is_given_is_that_of_each_run() -> None:
    assert [run.samples for run in resolve_all(None, {"samples": 700}, [64, 512])] == [700, 700]
    assert [run.samples for run in resolve_all("queue", {}, [64, 512])] == [32_768, 32_768]


def test_no_more_client_processes_than_samples_in_flight() -> None:
    assert resolve(None, {"samples": 2, "client_processes": 8}).client_processes == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"samples": 0}, "--samples: '0' is not"),
        ({"abandon_polls": 1.5}, "--abandon-polls: '1.5'"),
        ({"cancel": -0.1}, "--cancel: '-0.1'"),
        ({"gen_seconds": -1.0}, "--gen-seconds: '-1.0'"),
        ({"heartbeat_seconds": 0.0}, "--heartbeat-seconds: '0.0'"),
    ],
)
def test_a_value_that_makes_no_run_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(None, given)


def test_shares_add_up() -> None:
    assert shares(10, 3) == [4, 3, 3]
    assert shares(2, 2) == [1, 1]


def test_plans_share_the_samples_out_and_come_from_addresses_of_their_own() -> None:
    scenario = resolve(None, {"samples": 10, "client_processes": 3, "concurrency": 5})
    plans = make_plans(scenario, "http://127.0.0.1:8000", "m", "tml-x", verify=True)
    indices = [index for plan in plans for index in range(plan.first, plan.samples, plan.step)]
    assert sorted(indices) == list(range(10))
    assert [plan.concurrency for plan in plans] == [2, 2, 1]
    assert [plan.source_ip for plan in plans] == ["127.0.1.1", "127.0.1.2", "127.0.1.3"]


@pytest.mark.parametrize("url", ["http://10.0.0.5:8000", "http://[::1]:8000", "http://gateway.internal"])
def test_no_loopback_source_where_the_gateway_is_elsewhere(url: str) -> None:
    assert source_ip(url, 0) is None


def test_progress_is_summed() -> None:
    assert total_progress([Progress(1, 2, 3, 4, 5), Progress(10, 20, 30, 40, 50)]) == Progress(11, 22, 33, 44, 55)


def test_commands_pass_on_what_the_scenario_says() -> None:
    scenario = resolve(None, {"max_num_seqs": 64, "source_ips": "127.0.2.1", "workers": 3, "vllm_mode": "instant"})
    simulator, gateway = simulator_command(scenario), gateway_command(scenario, "http://127.0.0.1:1", Path("/r"))
    assert simulator[simulator.index("--mode") + 1] == "instant"
    assert simulator[simulator.index("--max-num-seqs") + 1] == "64"
    assert gateway[gateway.index("--upstream") + 1] == "http://127.0.0.1:1"
    assert gateway[gateway.index("--source-ips") + 1] == "127.0.2.1"
    assert gateway[gateway.index("--workers") + 1] == "3"


@pytest.mark.parametrize(
    ("open_files", "values", "most"),
    [
        (20_000, {"workers": 2}, 9_500),
        (20_000, {"workers": 4}, 4_750),
        (20_000, {"workers": 4, "source_ips": "127.0.2.1-127.0.2.4"}, 4_750),
        # By itself a worker leaves half of its files to its clients.
        (20_000, {"workers": 1}, None),
        (20_000, {"workers": 2, "simulator_processes": 2}, None),
        # Ports are what limits the gateway.
        (1_000_000, {"workers": 2}, None),
        # All are to be held at once.
        (20_000, {"workers": 2, "vllm_mode": "barrier"}, None),
    ],
)
def test_the_simulated_vllm_is_not_asked_for_more_connections_than_it_has_files(
    open_files: int, values: dict[str, Any], most: int | None
) -> None:
    assert upstream_connections(resolve(None, values), open_files, DEFAULT_RANGE) == most


def test_a_barrier_waits_for_all_that_are_in_flight_at_once() -> None:
    def size(**values: Any) -> str | None:
        command = simulator_command(resolve(None, {"vllm_mode": "barrier", **values}))
        return command[command.index("--barrier-size") + 1] if "--barrier-size" in command else None

    assert size(samples=100, concurrency=40) == "40"
    assert size(samples=100, concurrency=400) == "100"
    assert size(samples=100, simulator_processes=2) is None


def test_the_simulated_context_grows_with_what_is_asked_for() -> None:
    assert "--max-model-len" not in simulator_command(resolve(None, {}))
    command = simulator_command(resolve(None, {"prompt_tokens": 100, "max_tokens": 262_144}))
    assert command[command.index("--max-model-len") + 1] == "262244"


def test_the_admin_address_is_found_in_the_ready_line() -> None:
    line = (
        "gateway: http://127.0.0.1:8000, 2 workers, results in redis; admin http://127.0.0.1:8001/; TINKER_BASE_URL=x"
    )
    assert admin_url_in(line) == "http://127.0.0.1:8001"
    assert admin_url_in("http://127.0.0.1:8000 only") is None


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_the_ready_line_names_an_address_that_clients_can_connect_to(host: str) -> None:
    line = ready_line(Settings(workers=2), f"http://{host}:8000", "http://127.0.0.1:8001", "a Redis")
    assert f"ready: http://{host}:8000 " in line
    assert "TINKER_BASE_URL=http://THIS-HOST:8000 " in line


def test_where_results_are_kept_is_found_in_the_ready_line() -> None:
    line = ready_line(Settings(workers=2), "http://127.0.0.1:8000", "http://127.0.0.1:8001", "a Redis (1 GiB, one)")
    assert kept_in(line) == "a Redis (1 GiB, one)"
    assert admin_url_in(line) == "http://127.0.0.1:8001"
    assert kept_in("something else") is None
