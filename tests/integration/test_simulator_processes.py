"""`gateway simulate-vllm` as it is started: real processes on uvloop, one or several."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest
from click.testing import CliRunner

from gateway.simulator.command import simulate_vllm
from gateway.simulator.config import SimulatorConfig
from gateway.simulator.processes import shares
from gateway.simulator.tokens import sampled
from shared.core.errors import StartError
from tests.waiting import DEADLINE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ASKED: Final = {"model": "sim/tiny", "prompt": [10, 11, 12], "max_tokens": 4, "seed": 7, "return_token_ids": True}


@contextmanager
def running(*flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process that was started, and its port."""
    command = [sys.executable, "-m", "gateway", "simulate-vllm", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.match(r"simulated vLLM on http://127\.0\.0\.1:(\d+) \(", line)
            assert found is not None, line
            yield process, int(found[1])
        finally:
            process.kill()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def send(connection: socket.socket, method: str, path: str, document: Any = None, request_id: str = "x-a1") -> None:
    body = json.dumps(document).encode() if document is not None else b""
    head = f"{method} {path} HTTP/1.1\r\nx-request-id: {request_id}\r\ncontent-length: {len(body)}\r\n"
    connection.sendall(head.encode() + b"connection: close\r\n\r\n" + body)


def received(connection: socket.socket) -> bytes:
    """All that comes until the end."""
    with connection:
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def call(port: int, method: str, path: str, document: Any = None) -> Any:
    connection = connect(port)
    send(connection, method, path, document)
    head, _, body = received(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    return json.loads(body)


def refused(port: int) -> bool:
    try:
        connect(port).close()
    except ConnectionRefusedError:
        return True
    return False


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as listed:
        return [int(child) for child in listed.read().split()]


def serves(pid: int) -> bool:
    """Whether a child is one that serves, and not the one that Python keeps beside spawned ones."""
    with open(f"/proc/{pid}/cmdline", "rb") as command:
        return b"spawn_main" in command.read()


@pytest.mark.slow
def test_one_process_on_uvloop_misbehaves_as_told() -> None:
    """D18 and the ends of connections, which are the event loop's own business."""
    with running() as (process, port):
        tokens = sampled("sim/tiny", [10, 11, 12], 7, 4)[0].tolist()
        assert call(port, "POST", "/v1/completions", ASKED)["choices"][0]["token_ids"] == tokens

        call(port, "POST", "/_sim/faults", [{"kind": "reset_before_read", "next": 1}])
        connection = connect(port)
        send(connection, "POST", "/v1/completions", ASKED)
        with pytest.raises(ConnectionResetError):
            received(connection)

        call(port, "POST", "/_sim/faults", [{"kind": "reset_before_status", "next": 1}])
        connection = connect(port)
        send(connection, "POST", "/v1/completions", ASKED)
        assert received(connection) == b""

        call(port, "POST", "/_sim/faults", [{"kind": "slow_accept", "delay_s": 0.05}])
        assert call(port, "GET", "/_sim/stats")["aborted"] == 1

        call(port, "POST", "/_sim/faults", [{"kind": "drain"}])
        eventually(lambda: refused(port), "new connections are refused")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.slow
def test_several_processes_act_and_count_as_one() -> None:
    with running("--processes", "2") as (process, port):
        assert len([child for child in children_of(process.pid) if serves(child)]) == 2
        call(port, "POST", "/_sim/faults", {"faults": [{"kind": "hold"}]})
        held = [connect(port) for _ in range(16)]
        for connection in held:
            send(connection, "POST", "/v1/completions", ASKED)
        eventually(
            lambda: call(port, "GET", "/_sim/stats"), "all are held", until=lambda stats: stats["in_flight"] == 16
        )
        call(port, "POST", "/_sim/release")
        assert all(received(connection).startswith(b"HTTP/1.1 200 ") for connection in held)
        call(port, "DELETE", "/_sim/faults")
        stats = call(port, "GET", "/_sim/stats")
        assert (stats["received"], stats["executions"], stats["completed"]) == (16, 16, 16)
        assert stats["by_request_id"] == {"x": 16}
        assert stats["by_source_ip"] == {"127.0.0.1": 16}

        adapter = {"lora_name": "a1", "lora_path": "/adapters/a1"}
        connection = connect(port)
        send(connection, "POST", "/v1/load_lora_adapter", adapter)
        assert b"added successfully" in received(connection)
        for _ in range(16):
            assert call(port, "POST", "/v1/completions", {**ASKED, "model": "a1"})["model"] == "a1"

        call(port, "POST", "/_sim/reset")
        assert call(port, "GET", "/_sim/stats")["received"] == 0
        call(port, "POST", "/_sim/faults", [{"kind": "drain"}])
        eventually(lambda: refused(port), "new connections are refused")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.slow
def test_a_process_that_ends_takes_the_others_with_it() -> None:
    with running("--processes", "2") as (process, port):
        first, second = (child for child in children_of(process.pid) if serves(child))
        os.kill(first, signal.SIGKILL)
        assert process.wait(DEADLINE_S) == 1
        assert process.stderr is not None
        assert process.stderr.read() == "gateway: a process of the simulator ended unexpectedly\n"
        assert refused(port)
        eventually(lambda: not os.path.exists(f"/proc/{second}"), "the other one has gone too")


@pytest.mark.slow
def test_processes_end_and_clear_up_when_their_parent_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running("--processes", "2") as (process, port):
        assert list(tmp_path.glob("simulator-*/*.sock"))
        process.kill()
        eventually(lambda: refused(port), "the port is free")
        eventually(lambda: list(tmp_path.iterdir()), "nothing is left", until=lambda left: not left)


def test_the_running_limit_is_divided_among_processes() -> None:
    assert [one.max_num_seqs for one in shares(SimulatorConfig(max_num_seqs=5), 3)] == [2, 2, 1]
    assert [one.max_num_seqs for one in shares(SimulatorConfig(), 3)] == [0, 0, 0]
    with pytest.raises(ValueError, match="--max-num-seqs 2 is less than --processes 3"):
        shares(SimulatorConfig(max_num_seqs=2), 3)


@pytest.mark.parametrize("more", [[], ["--processes", "2"]], ids=["one", "two"])
def test_a_port_in_use_is_one_sentence(more: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            CliRunner().invoke(simulate_vllm, ["--port", str(port), *more], catch_exceptions=False)
