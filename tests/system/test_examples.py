"""The examples as users run them: the published SDK, tinker-cookbook, a gateway and simulated vLLMs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from gateway.simulator.tokens import find_seed
from tests.system.expected import check_sequences
from tests.system.fleet import Fleet, executions
from tests.system.sdk_env import InstallError, SdkEnv, cookbook_env
from tests.system.sdk_run import API_KEY

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.system.stack import Gateway

pytestmark = [pytest.mark.slow, pytest.mark.sdk, pytest.mark.timeout(300)]

EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"
MODEL: Final = "sim/tiny"
STEPS, PROMPTS, GROUP = 3, 8, 2


def run_example(name: str, sdk: SdkEnv, host: Gateway, directory: Path, *arguments: str) -> str:
    env = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    env |= {"TINKER_BASE_URL": host.url, "TINKER_API_KEY": API_KEY, "HOME": str(directory)}
    command = [str(sdk.python), str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=directory, env=env, timeout=200, check=False)
    # 0.38.0's own threads sometimes abort the interpreter at its very end, without a word, when all has been done: what
    # it printed and wrote is looked at.
    at_its_end = done.returncode == -signal.SIGABRT and not done.stderr
    assert done.returncode == 0 or at_its_end, done.stderr[-8000:]
    return done.stdout


@pytest.mark.parametrize("version", ["0.25.0", "0.38.0"])
def test_the_rl_loop_samples_each_adapter_that_it_has_just_saved(
    fleet: Fleet, tmp_path: Path, published_sdk: Callable[[str], SdkEnv], version: str
) -> None:
    """Two upstreams, two workers: each adapter is loaded once into each, and every token is the adapter's own."""
    upstreams = [fleet.start_upstream("--lora", "files") for _ in range(2)]
    host = fleet.start_host("--lora-path", f"{tmp_path}/adapters/{{run_id}}/{{checkpoint}}")
    out = tmp_path / "rollouts.jsonl"
    arguments = {"adapters": tmp_path / "adapters", "run-id": "run-1", "steps": STEPS, "prompts": PROMPTS}
    arguments |= {"group-size": GROUP, "max-tokens": 8, "out": out}
    words = [word for flag, value in arguments.items() for word in (f"--{flag}", str(value))]
    told = run_example("rl_loop.py", published_sdk(version), host, tmp_path, *words)
    assert told.count("step ") == STEPS
    rollouts = [json.loads(line) for line in out.read_text().splitlines()]
    assert Counter(rollout["step"] for rollout in rollouts) == dict.fromkeys(range(STEPS), PROMPTS * GROUP)
    for first, second in zip(rollouts[::GROUP], rollouts[1::GROUP], strict=True):
        check_group(first, second)
    assert [upstream.stats()["adapter_loads"] for upstream in upstreams] == [STEPS, STEPS]
    # A sample per prompt, and the reference's logprobs of each sequence.
    assert sum(executions(*upstreams)) == STEPS * PROMPTS * (1 + GROUP)


def check_group(*rollouts: dict[str, Any]) -> None:
    first = rollouts[0]
    request = {
        "prompt": [{"tokens": first["prompt"]}],
        "num_samples": len(rollouts),
        "params": {"seed": first["seed"], "max_tokens": 8, "temperature": 1.0},
    }
    check_sequences(rollouts, f"run-1--{first['step']:06}", request)
    assert abs(sum(rollout["advantage"] for rollout in rollouts)) < 1e-9


def test_the_cookbooks_completers_sample_through_the_gateway(fleet: Fleet, tmp_path: Path) -> None:
    try:
        cookbook = cookbook_env()
    except InstallError as error:
        pytest.skip(f"tinker-cookbook cannot be installed here: {error}")
    fleet.start_upstream()
    host = fleet.start_host()
    told = json.loads(run_example("cookbook_completers.py", cookbook, host, tmp_path, "--questions", "6"))
    assert len(told["messages"]) == 6
    assert all(len(message) == 16 for message in told["messages"])
    for prompt, completion in zip(told["prompts"], told["completions"], strict=True):
        assert find_seed(MODEL, prompt, completion["tokens"]) is not None
        request = {"prompt": [{"tokens": prompt}], "num_samples": 1, "params": {"max_tokens": 16}}
        check_sequences([completion], MODEL, request)
