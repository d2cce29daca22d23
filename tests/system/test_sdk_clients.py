"""Clients of the published SDKs when something happens: pickled, cancelled, failed upstream, a worker killed."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.system import expected
from tests.system.sdk_env import VERSIONS, SdkEnv
from tests.system.sdk_run import Script, run_script, sample
from tests.system.stack import Stack, running_stack
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.sdk, pytest.mark.timeout(400)]

PROCESSES: Final = 4
EACH: Final = 50
PROMPT: Final = [301, 302, 303]
FAULT_TEXT: Final = "the model fell over"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    # Short polls, so that whatever takes its time goes through many of them. A long lease, so that it is the supervisor
    # who ends a dead worker's samples.
    flags = ["--poll-timeout", "1", "--lease", "300"]
    with running_stack(tmp_path_factory.mktemp("sdk-clients"), *flags) as stack:
        yield stack


@pytest.fixture(scope="module", params=VERSIONS)
def sdk(request: pytest.FixtureRequest, published_sdk: Callable[[str], SdkEnv]) -> SdkEnv:
    return published_sdk(request.param)


@pytest.fixture(autouse=True)
def well_behaved(stack: Stack) -> None:
    stack.simulator.script()


def main_client(stack: Stack) -> dict[str, str]:
    return {"base_model": stack.model}


def check_all(stack: Stack, requests: dict[str, Any], answers: dict[str, Any]) -> None:
    assert set(answers) == set(requests)
    for name, request in requests.items():
        assert "result" in answers[name], answers[name]
        expected.check_sequences(answers[name]["result"]["sequences"], stack.model, request)


def test_pickled_clients_in_other_processes_mix_nothing_up(stack: Stack, sdk: SdkEnv) -> None:
    """A10: with random clone numbers below 0.32, with those of join_sampling_session from there on."""
    wanted = [
        {f"{number}": sample([300, process, number], max_tokens=8, seed=number) for number in range(EACH)}
        for process in range(PROCESSES)
    ]
    told = run_script(sdk, stack, "pickled_clients.py", model=main_client(stack), processes=wanted)
    for requests, answers in zip(wanted, told["answers"], strict=True):
        check_all(stack, requests, answers)
    assert told["warnings"] == []


def test_waiting_through_many_polls_worries_nobody(stack: Stack, sdk: SdkEnv) -> None:
    """A 200 `try_again` would log a warning for each poll of each sample."""
    requests = {f"{number}": sample([500, number], 2, max_tokens=8, seed=number) for number in range(8)}
    arguments = {"clients": {"main": main_client(stack)}, "requests": requests}
    with Script(sdk, stack, "run_requests.py", arguments) as script:
        with stack.simulator.holding():
            stack.simulator.runs(len(requests))
            a_round = 1 if sdk.release >= (0, 27, 2) else len(requests)
            polls_reach(stack, polls(stack) + 2 * a_round)
        told = script.result()
    check_all(stack, requests, told["answers"])
    assert told["warnings"] == []


def polls(stack: Stack) -> int:
    """Of both kinds: for one sample, or one for all of a sampling session."""
    return stack.gateway.counter("polls") + stack.gateway.counter("session_polls")


def polls_reach(stack: Stack, count: int) -> None:
    eventually(lambda: polls(stack), f"{count} polls", until=lambda seen: seen >= count)


@pytest.mark.parametrize("version", ["0.26.2", "0.38.0"])
def test_a_cancelled_sample_is_aborted_upstream(
    stack: Stack, published_sdk: Callable[[str], SdkEnv], version: str
) -> None:
    """D7: in both ways of waiting; SDKs before 0.26 send no cancel."""
    aborted = stack.simulator.stats()["aborted"]
    slow, quick = sample(PROMPT, max_tokens=8, seed=2), sample(PROMPT, max_tokens=8, seed=1)
    arguments = {"model": main_client(stack), "slow": slow, "quick": quick}
    with Script(published_sdk(version), stack, "cancel_one.py", arguments) as script:
        with stack.simulator.holding():
            stack.simulator.runs(1)
            # The SDK sends no cancel for a sample whose promise it has not read yet.
            polls_reach(stack, polls(stack) + 1)
            script.go_on()
            eventually(lambda: stack.simulator.stats()["aborted"] > aborted, "its abort")
        told = script.result()
    assert told["slow"]["error"] == "CancelledError"
    check_all(stack, {"quick": quick}, {"quick": told["quick"]})


def test_a_failure_upstream_reaches_the_user_as_the_servers(stack: Stack, sdk: SdkEnv) -> None:
    stack.simulator.script({"kind": "status", "status": 500, "body": FAULT_TEXT})
    requests = {"failing": sample(PROMPT, max_tokens=8)}
    told = run_script(sdk, stack, "run_requests.py", clients={"main": main_client(stack)}, requests=requests)
    failing = told["answers"]["failing"]
    assert (failing["error"], failing["category"]) == ("RequestFailedError", "server")
    assert FAULT_TEXT in failing["message"]


def test_samples_of_a_killed_worker_are_submitted_again_by_the_sdk(stack: Stack, sdk: SdkEnv) -> None:
    """B11: the dead worker's samples are orphaned and announced, and the user sees nothing of it."""
    orphaned = stack.gateway.counter("orphaned")
    requests = {f"{number}": sample([400, number], max_tokens=8, seed=number) for number in range(24)}
    arguments = {"clients": {"main": main_client(stack)}, "requests": requests}
    with Script(sdk, stack, "run_requests.py", arguments) as script:
        with stack.simulator.holding():
            stack.simulator.runs(len(requests))
            victim = eventually(lambda: busiest(stack), "a worker with samples")
            os.kill(victim["pid"], signal.SIGKILL)
            stack.gateway.counter_reaches("orphaned", orphaned + victim["in_flight"])
        told = script.result()
    check_all(stack, requests, told["answers"])
    heir = eventually(
        lambda: stack.gateway.workers()[victim["slot"]],
        "a worker in its place",
        until=lambda worker: worker["restarts"] == victim["restarts"] + 1,
    )
    assert heir["source_ip"] == victim["source_ip"]


def busiest(stack: Stack) -> dict[str, Any] | None:
    """The worker with the most samples in flight, once one is reported."""
    worker = max(stack.gateway.workers(), key=lambda worker: worker["in_flight"])
    return worker if worker["in_flight"] else None


def test_back_pressure_slows_the_sdk_down_and_loses_nothing(
    tmp_path: Path, published_sdk: Callable[[str], SdkEnv]
) -> None:
    """E3, in small: what is above the limit gets 429, waits in the client, and is accepted later."""
    requests = {f"{number}": sample([600, number], max_tokens=8, seed=number) for number in range(60)}
    with running_stack(tmp_path, "--max-in-flight", "8") as stack:
        arguments = {"clients": {"main": main_client(stack)}, "requests": requests}
        with Script(published_sdk("0.38.0"), stack, "run_requests.py", arguments) as script:
            with stack.simulator.holding():
                stack.gateway.counter_reaches("rejected_in_flight", 1)
                assert stack.simulator.stats()["peak_in_flight"] <= 2 * 8
            told = script.result()
        check_all(stack, requests, told["answers"])
