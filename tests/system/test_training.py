"""A script that trains and samples, written for one address: gateway, training server and engine behind it."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.system import expected
from tests.system.http_calls import call
from tests.system.processes import Process
from tests.system.sdk_env import VERSIONS, SdkEnv
from tests.system.sdk_run import API_KEY, run_script, sample
from tests.system.stack import Stack, running_gateway, running_simulator
from tests.system.trainer_process import LOSS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.sdk, pytest.mark.timeout(400)]

DATUMS: Final = 300


class TrainerProcess:
    def __init__(self, directory: Path, engine_url: str) -> None:
        command = [sys.executable, "-m", "tests.system.trainer_process", engine_url]
        self.process = Process("trainer", command, directory)
        self.url = self.process.ready_line().strip()

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = call("GET", f"{self.url}/_calls").json()
        return found


@contextmanager
def stack_with_trainer(directory: Path, *flags: str) -> Iterator[tuple[Stack, TrainerProcess]]:
    """The gateway in front of an engine and a training server that loads what it saves into that engine."""
    with running_simulator(directory) as simulator:
        trainer = TrainerProcess(directory, simulator.url)
        try:
            with running_gateway(directory, simulator, "--training-upstream", trainer.url, *flags) as stack:
                yield stack, trainer
        finally:
            trainer.process.kill()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, TrainerProcess]]:
    directory = tmp_path_factory.mktemp("training")
    with stack_with_trainer(directory) as found:
        yield found


@pytest.fixture(scope="module", params=[VERSIONS[0], VERSIONS[-1]])
def sdk(request: pytest.FixtureRequest, published_sdk: Callable[[str], SdkEnv]) -> SdkEnv:
    return published_sdk(request.param)


def test_one_script_trains_saves_and_samples_what_it_saved(trained: tuple[Stack, TrainerProcess], sdk: SdkEnv) -> None:
    stack, trainer = trained
    requests = {
        name: sample([7, 8, number], 2, max_tokens=8, seed=number)
        for number, name in enumerate(("born", "named", "base"))
    }
    told = run_script(sdk, stack, "train_and_sample.py", model=stack.model, datums=DATUMS, requests=requests)

    assert told["metrics"] == {"loss:sum": LOSS}
    assert told["step"] == {"lr": 1.0}
    assert told["model_id"] == f"{told['session_id']}:train:0"
    assert told["saved"] == [
        f"tinker://{told['model_id']}/weights/after-one",
        f"tinker://{told['model_id']}/sampler_weights/named",
    ]
    adapter = told["model_id"]
    for name, model in (("born", adapter), ("named", adapter), ("base", stack.model)):
        assert "result" in told["answers"][name], told["answers"][name]
        expected.check_sequences(told["answers"][name]["result"]["sequences"], model, requests[name])
    assert set(told["base_models"].values()) == {stack.model}
    # The SDK's own word on one of its calls.
    assert [line for line in told["warnings"] if "DEPRECATED: TrainingClient.load_state" not in line] == []
    check_trainer(trainer, told["session_id"], finishes=sdk.release >= (0, 27, 2))


def check_trainer(trainer: TrainerProcess, session_id: str, *, finishes: bool) -> None:
    """What reached it: the trainer's own, once each, and no key."""
    seen = trainer.told()
    # SDK 0.25 does not say that it is over.
    assert seen["sessions"][session_id]["finished"] == (1 if finishes else 0)
    paths = [entry["path"].removeprefix("/api/v1") for entry in seen["calls"]]
    assert {"/create_model", "/forward_backward", "/optim_step", "/save_weights", "/load_weights"} <= set(paths)
    assert not {"/asample", "/create_sampling_session", "/telemetry", "/client/config"}.intersection(paths)
    assert all(API_KEY not in str(entry["headers"]) for entry in seen["calls"])
