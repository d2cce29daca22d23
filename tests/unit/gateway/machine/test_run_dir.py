from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from gateway.machine.run_dir import open_run_dir
from shared.core.errors import StartError

if TYPE_CHECKING:
    from pathlib import Path


def test_one_of_our_own_is_private_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    run_dir = open_run_dir(None)
    assert run_dir.path.parent == tmp_path
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    assert (run_dir.path / "gateway.pid").read_text() == f"{os.getpid()}\n"
    (run_dir.path / "left.sock").touch()
    run_dir.close()
    assert not run_dir.path.exists()


def test_a_given_one_is_made_and_kept(tmp_path: Path) -> None:
    run_dir = open_run_dir(str(tmp_path / "a" / "b"))
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    run_dir.close()
    assert run_dir.path.exists()
    assert not (run_dir.path / "gateway.pid").exists()


def test_two_at_once_are_refused_and_one_after_the_other_not(tmp_path: Path) -> None:
    first = open_run_dir(str(tmp_path))
    with pytest.raises(StartError, match="in use by another gateway"):
        open_run_dir(str(tmp_path))
    first.close()
    open_run_dir(str(tmp_path)).close()


def test_a_pid_file_of_a_killed_gateway_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "gateway.pid").write_text("1\n" * 10)
    run_dir = open_run_dir(str(tmp_path))
    assert (tmp_path / "gateway.pid").read_text() == f"{os.getpid()}\n"
    run_dir.close()


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=f"--run-dir: {tmp_path}/file cannot be used"):
        open_run_dir(str(tmp_path / "file"))
