from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.supervision import worker_process

PROBE = "probe_of_bytecode"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that was never imported."""
    directory = tmp_path / PROBE
    directory.mkdir()
    (directory / "__init__.py").write_text("'''nothing'''\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return directory


def test_is_kept_where_it_can_be_written(package: Path) -> None:
    assert worker_process.is_kept(PROBE)


def test_is_not_kept_where_that_is_forbidden_unless_it_stands_there(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert not worker_process.is_kept(PROBE)
    command = [sys.executable, "-m", "compileall", "-q", str(package)]
    subprocess.run(command, check=True, env={"PATH": os.environ["PATH"]})
    assert worker_process.is_kept(PROBE)


def test_is_not_kept_where_nobody_may_write(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # the superuser may write anywhere
    assert not worker_process.is_kept(PROBE)


def test_the_environment_is_unchanged_where_byte_code_is_kept() -> None:
    environ = {"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/h"}
    assert worker_process.worker_environ(environ, Path("/run"), kept=True) == environ


def test_a_worker_keeps_it_in_the_run_directory_otherwise() -> None:
    environ = {"PYTHONDONTWRITEBYTECODE": "1", "HOME": "/h"}
    expected = {"HOME": "/h", "PYTHONPYCACHEPREFIX": "/run/bytecode"}
    assert worker_process.worker_environ(environ, Path("/run"), kept=False) == expected
