"""Runs a script of `sdk_scripts/` under an SDK's interpreter against a stack, and builds what such scripts take."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from tests.system.processes import Process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.system.sdk_env import SdkEnv
    from tests.system.stack import Stack

_SCRIPTS: Final = Path(__file__).with_name("sdk_scripts")
_RUN_S: Final = 180.0
API_KEY: Final = "tml-system-test"
# The rest of this process' environment may hold settings of an SDK or a proxy.
_PASSED_ON: Final = ("PATH", "LANG", "LC_ALL", "TMPDIR")


class Script:
    """A script that runs, and does so no longer than the `with` block. `result` waits for its one line."""

    def __init__(self, sdk: SdkEnv, stack: Stack, name: str, arguments: dict[str, Any]) -> None:
        env = {key: os.environ[key] for key in _PASSED_ON if key in os.environ}
        env |= {
            "TINKER_BASE_URL": stack.gateway.url,
            "TINKER_API_KEY": API_KEY,
            "HOME": str(stack.directory),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [str(sdk.python), str(_SCRIPTS / name)]
        self._process = Process(name, command, stack.directory, env, stdin=subprocess.PIPE)
        self._send(json.dumps(arguments))

    def go_on(self) -> None:
        """Send the line that the script waits for."""
        self._send("")

    def _send(self, line: str) -> None:
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        code = self._process.wait(_RUN_S)
        assert code == 0, f"{self._process.name} ended with {code}:\n{self._process.log}"
        told: dict[str, Any] = json.loads(self._process.output.splitlines()[-1])
        return told

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()


def run_script(sdk: SdkEnv, stack: Stack, name: str, **arguments: Any) -> dict[str, Any]:
    with Script(sdk, stack, name, arguments) as script:
        return script.result()


def sample(
    prompt: Sequence[int],
    num_samples: int = 1,
    *,
    options: dict[str, Any] | None = None,
    client: str = "main",
    **params: Any,
) -> dict[str, Any]:
    """One `sample()` call; `params` are its SamplingParams, `options` its other arguments."""
    return {
        "client": client,
        "prompt": [{"tokens": list(prompt)}],
        "num_samples": num_samples,
        "params": params,
        "options": options or {},
    }


def compute_logprobs(prompt: Sequence[int], **options: Any) -> dict[str, Any]:
    """One `compute_logprobs()` call."""
    return {"client": "main", "prompt": [{"tokens": list(prompt)}], "options": options}
