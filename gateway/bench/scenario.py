"""What a bench run does: its scenario, the presets that name whole runs, and the checks of both."""

from __future__ import annotations

import importlib.util
import subprocess
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from gateway.bench.watch import chaos
from shared.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

VllmMode = Literal["barrier", "latency", "instant"]

ClientKind = Literal["raw", "sdk"]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One bench run.

    `session_poll`: None uses what the gateway offers. `verify`: None verifies results if a simulator is known.
    `client`: `raw` is our own load client; `sdk` is the published SDK, run by the interpreter `sdk_python` (None: the
    bench's own). `chaos` is a plan in the form of chaos.py; empty breaks nothing.
    """

    samples: int = 2_048
    concurrency: int = 2_048
    prompt_tokens: int = 64
    max_tokens: int = 32
    num_samples: int = 1
    client: ClientKind = "raw"
    sdk_python: str | None = None
    client_processes: int = 1
    session_poll: bool | None = None
    vllm_mode: VllmMode = "latency"
    gen_seconds: float = 1.0
    max_num_seqs: int | None = None
    simulator_processes: int = 1
    workers: int = 2
    source_ips: str | None = None
    abandon_polls: float = 0.0
    cancel: float = 0.0
    duplicates: float = 0.0
    heartbeat_seconds: float = 10.0
    verify: bool | None = None
    seed: int = 0
    chaos: str = ""


# The small sample of every documented cost per sample.
_SMALL: Final = {"prompt_tokens": 128, "max_tokens": 64}

# A preset names only the values that differ from the defaults above.
PRESETS: Final[dict[str, dict[str, Any]]] = {
    "burst": {
        **_SMALL,
        "samples": 2_048,
        "concurrency": 2_048,
        "vllm_mode": "barrier",
        "gen_seconds": 5.0,
        "heartbeat_seconds": 1.0,
    },
    "queue": {
        **_SMALL,
        "samples": 32_768,
        "concurrency": 32_768,
        "vllm_mode": "latency",
        "gen_seconds": 5.0,
        "max_num_seqs": 2_048,
        "client_processes": 2,
    },
    "rollout": {
        **_SMALL,
        "samples": 131_072,
        "concurrency": 131_072,
        "vllm_mode": "latency",
        "gen_seconds": 5.0,
        "max_num_seqs": 2_048,
        "client_processes": 4,
        "session_poll": True,
    },
    "long": {"samples": 256, "concurrency": 128, "max_tokens": 32_768, "vllm_mode": "instant"},
    "prompts": {"samples": 512, "concurrency": 128, "prompt_tokens": 32_768, "vllm_mode": "instant"},
}


_COUNTS: Final = (
    "samples",
    "concurrency",
    "prompt_tokens",
    "max_tokens",
    "num_samples",
    "client_processes",
    "simulator_processes",
    "workers",
)


def resolve(preset: str | None, given: dict[str, Any]) -> Scenario:
    """Merge the preset's values with the given ones, which win. Raises `ConfigError` for a value out of range."""
    chosen = {**PRESETS.get(preset or "", {}), **given}
    chosen.setdefault("concurrency", min(chosen.get("samples", 2_048), 2_048))
    scenario = Scenario(**chosen)
    _check(scenario)
    scenario = msgspec.structs.replace(scenario, chaos=chaos.shown(chaos.make_plan(scenario.chaos, scenario.seed)))
    return msgspec.structs.replace(scenario, client_processes=min(scenario.client_processes, scenario.concurrency))


def shares(total: int, parts: int) -> list[int]:
    """Split `total` as evenly as possible, larger shares first."""
    base, extra = divmod(total, parts)
    return [base + (index < extra) for index in range(parts)]


# With ten times as many samples as are in flight, the start and the end of a run weigh little.
STEADY: Final = 10


def resolve_all(preset: str | None, given: dict[str, Any], concurrencies: Sequence[int]) -> list[Scenario]:
    """Return one scenario for each of `concurrencies`, or a single one if there are none. Raises as `resolve`.

    If there are several, each has `STEADY` times as many samples as it has in flight, unless their number is given.
    """
    if not concurrencies:
        return [resolve(preset, given)]
    if len(concurrencies) == 1:
        return [resolve(preset, given | {"concurrency": concurrencies[0]})]
    known = given.get("samples", PRESETS.get(preset or "", {}).get("samples"))
    return [
        resolve(preset, given | {"concurrency": value, "samples": known or STEADY * value}) for value in concurrencies
    ]


def _check(scenario: Scenario) -> None:
    for name in _COUNTS:
        if getattr(scenario, name) < 1:
            raise _refusal(scenario, name, "give a whole number of at least 1")
    for name in ("abandon_polls", "cancel", "duplicates"):
        if not 0 <= getattr(scenario, name) <= 1:
            raise _refusal(scenario, name, "give a number from 0 to 1")
    _check_sdk(scenario)
    if scenario.gen_seconds < 0:
        raise _refusal(scenario, "gen_seconds", "give seconds of at least 0")
    if scenario.heartbeat_seconds <= 0:
        raise _refusal(scenario, "heartbeat_seconds", "give seconds above 0")


def _check_sdk(scenario: Scenario) -> None:
    if scenario.client != "sdk":
        if scenario.sdk_python is not None:
            raise ConfigError("--sdk-python has no meaning without --client sdk; give both or none")
        return
    for name in ("abandon_polls", "cancel", "duplicates"):
        if getattr(scenario, name):
            raise ConfigError(f"{_flag(name)} needs --client raw; the SDK cannot be made to do this")


def _refusal(scenario: Scenario, name: str, allowed: str) -> ConfigError:
    return ConfigError(f"{_flag(name)}: '{getattr(scenario, name)}' is not allowed; {allowed}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# -- the interpreter of `--client sdk`

_HOW: Final = (
    "make an environment with `python3 -m venv sdk && sdk/bin/pip install tinker` and name its interpreter with "
    "--sdk-python sdk/bin/python"
)
# Importing the SDK takes a second or two on an idle machine.
_IMPORT_S: Final = 60.0


def check_sdk_python(scenario: Scenario) -> None:
    """Raise `ConfigError` if `--client sdk` has no SDK to run."""
    if scenario.client != "sdk":
        return
    python = scenario.sdk_python
    if python is None:
        if importlib.util.find_spec("tinker") is None:
            raise ConfigError(f"--client sdk: the package tinker is not installed beside the gateway; {_HOW}")
        return
    command = [python, "-P", "-c", "import tinker"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"--sdk-python: {python!r} cannot be run: {getattr(error, 'strerror', None) or error}; {_HOW}"
        ) from None
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"--sdk-python: {python!r} cannot import the package tinker ({reason}); {_HOW}")
