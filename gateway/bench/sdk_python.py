"""Which interpreter the SDK client runs under."""

from __future__ import annotations

import importlib.util
import subprocess
from typing import TYPE_CHECKING, Final

from shared.core.errors import ConfigError

if TYPE_CHECKING:
    from gateway.bench.scenario import Scenario

_HOW: Final = (
    "make an environment with `python3 -m venv sdk && sdk/bin/pip install tinker` and name its interpreter with "
    "--sdk-python sdk/bin/python"
)
# The SDK's imports take a second or two on a machine that is idle.
_IMPORT_S: Final = 60.0


def check(scenario: Scenario) -> None:
    """Raises `ConfigError` where `--client sdk` has no SDK to run."""
    if scenario.client != "sdk":
        return
    if scenario.sdk_python is not None:
        _check_given(scenario.sdk_python)
    elif importlib.util.find_spec("tinker") is None:
        raise ConfigError(f"--client sdk: the package tinker is not installed beside the gateway; {_HOW}")


def _check_given(python: str) -> None:
    try:
        done = subprocess.run(
            [python, "-P", "-c", "import tinker"],
            capture_output=True,
            text=True,
            timeout=_IMPORT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--sdk-python {python}: cannot be run: {error}; {_HOW}") from None
    if done.returncode != 0:
        words = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"--sdk-python {python}: the package tinker cannot be imported there ({words}); {_HOW}")
