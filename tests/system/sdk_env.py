"""A virtual environment per published SDK version, made once and shared by every run and every test process.

The real package with its real dependencies, but for `transformers`: only `get_tokenizer()` imports it, which would then
ask a model hub, and it is most of the download. The package comes from wherever this machine's package client looks.
One has tinker-cookbook beside the SDK. An environment is built aside and renamed into place under a lock, so that a
half-made one is never seen.

    python -m tests.system.sdk_env

makes all of them at the same time: beside other work they are there before a test asks for them. Whatever it cannot
make is the tests' to report, which try again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

VERSIONS: Final = ("0.25.0", "0.26.2", "0.38.0")
LEFT_OUT: Final = "transformers"
_COOKBOOK: Final = "tinker-cookbook==0.6.1"
_COOKBOOK_SDK: Final = "0.38.0"
_CHECKOUT: Final = Path(__file__).resolve().parents[2]
_INSTALL_S: Final = 240.0


@dataclass(frozen=True, slots=True)
class SdkEnv:
    version: str
    python: Path

    @property
    def release(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.version.split("."))


class InstallError(Exception):
    """The version cannot be installed here; carries the package client's own words."""


def _say_nothing(line: str) -> None:
    pass


def sdk_env(version: str, progress: Callable[[str], None]) -> SdkEnv:
    """The environment with `tinker==version`, made when there is none yet. Raises `InstallError`."""
    return SdkEnv(version, _made_once(version, lambda building: _install_sdk(version, building), progress))


def cookbook_env(progress: Callable[[str], None] = _say_nothing) -> SdkEnv:
    """An SDK's environment with tinker-cookbook beside it, its completers usable. Raises `InstallError`.

    Without most of what the cookbook requires: torch alone is gigabytes, and its completers compute nothing with it.
    """
    python = _made_once(f"{_COOKBOOK}-{_COOKBOOK_SDK}", _install_cookbook, progress)
    return SdkEnv(_COOKBOOK_SDK, python)


def _made_once(name: str, install: Callable[[Path], None], progress: Callable[[str], None]) -> Path:
    """The interpreter of an environment."""
    target = _cache_root() / f"{name}-{sys.implementation.cache_tag}"
    python = target / "bin" / "python"
    with _locked(target.with_name(target.name + ".lock")):
        # A link to an interpreter that has gone does not exist.
        if not python.exists():
            progress(f"installing tinker {name} ...")
            _build(install, target)
            progress(f"installing tinker {name}: done")
    return python


def _cache_root() -> Path:
    root = Path(os.environ.get("GATEWAY_TEST_CACHE") or _CHECKOUT / ".cache") / "sdk-envs"
    root.mkdir(parents=True, exist_ok=True)
    return root


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(install: Callable[[Path], None], target: Path) -> None:
    building = target.with_name(target.name + ".building")
    try:
        install(building)
        shutil.rmtree(target, ignore_errors=True)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _install_sdk(version: str, building: Path) -> None:
    try:
        _install_with_uv(version, building)
    except InstallError as first:
        # uv does not read pip's configuration: the machine's index may be known to pip alone.
        try:
            _install_with_pip(version, building)
        except InstallError as second:
            raise InstallError(f"tinker {version} cannot be installed:\n{first}\n{second}") from None


def _install_cookbook(building: Path) -> None:
    _install_sdk(_COOKBOOK_SDK, building)
    python = str(building / "bin" / "python")
    wanted = ["--no-deps", _COOKBOOK, "pillow"]
    try:
        _run([sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python, *wanted])
    except InstallError:
        _run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *wanted])
    site_packages = _run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    # A name that annotations mention, and no more.
    (Path(site_packages) / "torch.py").write_text("class Tensor: ...\n")


def _install_with_uv(version: str, building: Path) -> None:
    shutil.rmtree(building, ignore_errors=True)
    uv = [sys.executable, "-m", "uv"]
    _run([*uv, "venv", "--quiet", "--python", sys.executable, str(building)])
    overrides = building / "left-out.txt"
    # A requirement whose marker is never true: uv's way of leaving a dependency out.
    overrides.write_text(f"{LEFT_OUT} ; python_version < '3'\n")
    install = [*uv, "pip", "install", "--quiet", "--python", str(building / "bin" / "python")]
    _run([*install, "--overrides", str(overrides), f"tinker=={version}"])


def _install_with_pip(version: str, building: Path) -> None:
    shutil.rmtree(building, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(building)])
    python = str(building / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*install, "--no-deps", f"tinker=={version}"])
    listing = "import importlib.metadata as m; print(*m.requires('tinker'), sep='\\n')"
    wanted = [line for line in _run([python, "-c", listing]).splitlines() if not _left_out(line)]
    _run([*install, *wanted])


def _left_out(requirement: str) -> bool:
    return requirement.startswith(LEFT_OUT) or "extra ==" in requirement


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise InstallError(f"{' '.join(command[1:])}: not done after {_INSTALL_S:g} s") from None
    if done.returncode != 0:
        raise InstallError(f"{' '.join(command[1:])}:\n{done.stderr or done.stdout}")
    return done.stdout


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main() -> int:
    wanted = [partial(sdk_env, version, _say) for version in VERSIONS] + [partial(cookbook_env, _say)]
    with ThreadPoolExecutor(len(wanted)) as pool:
        errors = [error for made in [pool.submit(make) for make in wanted] if (error := made.exception())]
    for error in errors:
        _say(str(error))
    return len(errors)


if __name__ == "__main__":
    sys.exit(main())
