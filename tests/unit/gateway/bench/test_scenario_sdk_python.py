"""The interpreter of the SDK client, and the errors if it has no SDK."""

from __future__ import annotations

import stat
import sys
from typing import TYPE_CHECKING

import pytest

from gateway.bench import scenario
from gateway.bench.driver import client_command
from gateway.bench.installation import gateway_command
from gateway.bench.scenario import Scenario, resolve
from shared.core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def interpreter(directory: Path, script: str) -> str:
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_raw_client_needs_no_sdk() -> None:
    scenario.check_sdk_python(Scenario())
    assert client_command(Scenario()) == [sys.executable, "-m", "gateway.bench.load.process"]


def test_an_environment_without_the_sdk_says_how_to_make_one() -> None:
    with pytest.raises(ConfigError, match=r"--client sdk: the package tinker is not .*pip install tinker"):
        scenario.check_sdk_python(Scenario(client="sdk"))


def test_the_users_interpreter_is_tried_before_anything_starts(tmp_path: Path) -> None:
    good = Scenario(client="sdk", sdk_python=interpreter(tmp_path, "exit 0"))
    scenario.check_sdk_python(good)
    assert client_command(good)[0] == good.sdk_python


@pytest.mark.parametrize(
    ("script", "words"), [("echo \"No module named 'tinker'\" >&2; exit 1", "No module named 'tinker'"), ("exit 3", "")]
)
def test_an_interpreter_without_the_sdk_is_named(script: str, words: str, tmp_path: Path) -> None:
    path = interpreter(tmp_path, script)
    with pytest.raises(ConfigError, match=rf"--sdk-python: '{path}' .*\({words}\)"):
        scenario.check_sdk_python(Scenario(client="sdk", sdk_python=path))


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--sdk-python: .*none' cannot be run: No such file or directory;"):
        scenario.check_sdk_python(Scenario(client="sdk", sdk_python=str(tmp_path / "none")))


def test_an_interpreter_is_no_use_to_the_raw_client() -> None:
    with pytest.raises(ConfigError, match="--sdk-python"):
        resolve(None, {"sdk_python": "python"})


@pytest.mark.parametrize("trouble", ["abandon_polls", "cancel", "duplicates"])
def test_the_sdk_makes_no_trouble(trouble: str) -> None:
    with pytest.raises(ConfigError, match="--" + trouble.replace("_", "-")):
        resolve(None, {"client": "sdk", trouble: 0.1})


def test_the_gateway_offers_the_sdk_no_session_poll_where_none_is_wanted(tmp_path: Path) -> None:
    def offered(**values: object) -> bool:
        return "--session-poll" not in gateway_command(resolve(None, values), "http://h", tmp_path)

    assert offered(client="sdk")
    assert not offered(client="sdk", session_poll=False)
    assert offered(session_poll=False)
