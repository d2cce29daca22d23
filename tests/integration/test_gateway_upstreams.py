"""`/upstreams` on the admin address and its command, over real sockets; the workers are fakes, which follow no list."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.integration.gateway_process import GatewayProcess
from tests.system.http_calls import call

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = "operators-only"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    (tmp_path / "key").write_text(KEY)
    with GatewayProcess(tmp_path, workers=1, flags=("--admin-key-file", str(tmp_path / "key"))) as started:
        yield started


def command(gateway: GatewayProcess, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    where = ["--admin", gateway.admin_url, "--admin-key-file", str(tmp_path / "key")]
    return subprocess.run(
        [sys.executable, "-m", "gateway", "upstreams", *arguments, *where], capture_output=True, text=True, check=False
    )


def test_a_list_is_published_shown_and_taken_back(gateway: GatewayProcess) -> None:
    url, key = f"{gateway.admin_url}/upstreams", {"X-Admin-Key": KEY}
    before = call("GET", url, headers=key).json()
    assert (before["source"], before["urls"]) == ("flags", ["http://127.0.0.1:1"])
    reply = call("PUT", url, ["http://10.0.0.1:8000/", "http://10.0.0.2:8000"], headers=key)
    assert reply.status == 200
    assert (reply.json()["source"], reply.json()["urls"]) == (
        "published",
        ["http://10.0.0.1:8000", "http://10.0.0.2:8000"],
    )
    assert call("GET", url, headers=key).json()["source"] == "published"
    after = call("DELETE", url, headers=key).json()
    assert (after["source"], after["urls"]) == (before["source"], before["urls"])


def test_who_has_no_key_publishes_nothing(gateway: GatewayProcess) -> None:
    url = f"{gateway.admin_url}/upstreams"
    for method in ("GET", "PUT", "DELETE"):
        assert call(method, url, ["http://evil"]).status == 401
    assert call("GET", url, headers={"X-Admin-Key": KEY}).json()["source"] == "flags"


@pytest.mark.parametrize("body", [[], {}, ["ftp://a"], ["http://a" + "a" * 70_000]])
def test_what_is_no_list_is_refused(gateway: GatewayProcess, body: object) -> None:
    reply = call("PUT", f"{gateway.admin_url}/upstreams", body, headers={"X-Admin-Key": KEY})
    assert reply.status == 400
    assert reply.json()["detail"]


def test_the_command_sets_lists_and_resets(gateway: GatewayProcess, tmp_path: Path) -> None:
    done = command(gateway, tmp_path, "set", "http://10.0.0.1:8000", "http://10.0.0.2:8000")
    assert (done.returncode, done.stderr) == (0, "")
    assert "http://10.0.0.2:8000" in done.stdout
    assert "2 upstreams, published at run time" in command(gateway, tmp_path, "list").stdout
    assert command(gateway, tmp_path, "reset").returncode == 0
    assert "set by the flags" in command(gateway, tmp_path, "list").stdout


def test_the_command_passes_a_refusal_on_in_one_line(gateway: GatewayProcess, tmp_path: Path) -> None:
    refused = command(gateway, tmp_path, "set", "http://a/v1")
    assert refused.returncode == 3
    assert "answered 400: 'http://a/v1' is not allowed; give the base URL without /v1" in refused.stderr
    assert refused.stderr.count("\n") == 1
