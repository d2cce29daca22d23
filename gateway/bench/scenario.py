"""Which interpreter the SDK client runs under.

What a bench run is told to do, and the presets that name whole runs.
"""

from __future__ import annotations

import importlib.util
import subprocess
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from gateway.bench.watch import chaos
from shared.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


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


VllmMode = Literal["barrier", "latency", "instant"]

ClientKind = Literal["raw", "sdk"]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """`session_poll`: None takes what the gateway offers. `verify`: None verifies where a simulator is known.

    `client`: our own load client, or the published SDK under the interpreter `sdk_python`, None for ours.
    `chaos`: what is broken and when, as in chaos.py; nothing when empty.
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


# What is called small wherever a cost per sample is told.
_SMALL: Final = {"prompt_tokens": 128, "max_tokens": 64}

# Each value only where the preset differs from the defaults above.
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
    """The preset's values under those that were given. Raises `ConfigError` for a value that makes no run."""
    chosen = {**PRESETS.get(preset or "", {}), **given}
    chosen.setdefault("concurrency", min(chosen.get("samples", 2_048), 2_048))
    scenario = Scenario(**chosen)
    _check(scenario)
    scenario = msgspec.structs.replace(scenario, chaos=chaos.shown(chaos.make_plan(scenario.chaos, scenario.seed)))
    return msgspec.structs.replace(scenario, client_processes=min(scenario.client_processes, scenario.concurrency))


def shares(total: int, parts: int) -> list[int]:
    """`total` split as evenly as it goes, the larger shares first."""
    base, extra = divmod(total, parts)
    return [base + (index < extra) for index in range(parts)]


# Ten times as many samples as are in flight: beginning and end of a run weigh little then.
STEADY: Final = 10


def resolve_all(preset: str | None, given: dict[str, Any], concurrencies: Sequence[int]) -> list[Scenario]:
    """A scenario for each of `concurrencies`, one in all when there is none. Raises `ConfigError` as `resolve`.

    Of several, each has `STEADY` times as many samples as it has in flight, unless their number is given.
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
            raise ConfigError(f"{_flag(name)} {getattr(scenario, name)}: must be at least 1")
    for name in ("abandon_polls", "cancel", "duplicates"):
        if not 0 <= getattr(scenario, name) <= 1:
            raise ConfigError(f"{_flag(name)} {getattr(scenario, name)}: must be a fraction between 0 and 1")
    _check_sdk(scenario)
    if scenario.gen_seconds < 0:
        raise ConfigError(f"--gen-seconds {scenario.gen_seconds}: must not be negative")
    if scenario.heartbeat_seconds <= 0:
        raise ConfigError(f"--heartbeat-seconds {scenario.heartbeat_seconds}: must be above 0")


def _check_sdk(scenario: Scenario) -> None:
    if scenario.client != "sdk":
        if scenario.sdk_python is not None:
            raise ConfigError("--sdk-python: only with --client sdk")
        return
    for name in ("abandon_polls", "cancel", "duplicates"):
        if getattr(scenario, name):
            raise ConfigError(f"{_flag(name)}: the SDK makes no such trouble; only --client raw does")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
