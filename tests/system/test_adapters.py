"""`--lora-path` from end to end: two workers, two simulated vLLMs, adapters whose files are there, or not."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.ports import free_port
from tests.system.fleet import Fleet, executions
from tests.system.http_calls import call
from tests.system.outcomes import failure_of, result_of, says_it_waits
from tests.system.pinned import Client, submit
from tests.waiting import DEADLINE_S

if TYPE_CHECKING:
    from pathlib import Path

    from tests.system.http_calls import Connection
    from tests.system.stack import Gateway, Simulator

pytestmark = pytest.mark.slow

MODEL: Final = "sim/tiny"
PROMPT: Final = [81, 82, 83]


class AdapterClient(Client):
    """A client of `tinker://run-1/sampler_weights/<checkpoint>`."""

    def __init__(self, connection: Connection, checkpoint: str) -> None:
        super().__init__(connection, MODEL)
        self.path = f"tinker://run-1/sampler_weights/{checkpoint}"
        self.reply = connection.post("/api/v1/create_sampling_session", self.asked(1))
        if self.reply.status == 200:
            self.sampling_session_id = self.reply.json()["sampling_session_id"]
        # What the simulated model computes with.
        self.model = f"run-1--{checkpoint}"

    def asked(self, ordinal: int) -> dict[str, Any]:
        return {"session_id": self.session_id, "sampling_session_seq_id": ordinal, "model_path": self.path}


def write_adapter(directory: Path, checkpoint: str) -> Path:
    made = directory / "adapters" / "run-1" / checkpoint
    made.mkdir(parents=True)
    (made / "adapter_config.json").touch()
    return made


def start(fleet: Fleet, directory: Path, upstreams: int = 2, lora_wait_s: int = 60) -> tuple[Gateway, list[Connection]]:
    for _ in range(upstreams):
        fleet.start_upstream("--lora", "files", "--port", str(free_port()))
    template = f"{directory}/adapters/{{run_id}}/{{checkpoint}}"
    host = fleet.start_host("--lora-path", template, "--lora-wait", str(lora_wait_s))
    return host, [fleet.connect(host, slot) for slot in (0, 1)]


def loads(*upstreams: Simulator) -> list[int]:
    return [upstream.stats()["adapter_loads"] for upstream in upstreams]


def test_an_adapter_is_loaded_once_into_each_upstream_and_sampled_over_any_worker(fleet: Fleet, tmp_path: Path) -> None:
    write_adapter(tmp_path, "000100")
    _, (first, second) = start(fleet, tmp_path)
    client = AdapterClient(first, "000100")
    told = second.get(f"/api/v1/samplers/{client.sampling_session_id}").json()
    assert (told["base_model"], told["model_path"]) == (MODEL, client.path)
    for number in range(16):
        connection = (first, second)[number % 2]
        body = client.body(number, [*PROMPT, number])
        result_of(connection, submit(connection, body)["request_id"], client, body)
    assert loads(*fleet.upstreams) == [1, 1]
    assert sum(executions(*fleet.upstreams)) == 16


def test_an_unknown_checkpoint_is_a_404_with_its_path(fleet: Fleet, tmp_path: Path) -> None:
    _, (first, _) = start(fleet, tmp_path, upstreams=1)
    client = AdapterClient(first, "nowhere")
    assert client.reply.status == 404
    assert client.path in client.reply.json()["detail"]
    for path in ("tinker://run-1/../../etc", "tinker://run-1/sampler_weights/../x", "tinker://a b/c"):
        client.path = path
        refused = first.post("/api/v1/create_sampling_session", client.asked(2))
        assert (refused.status, path in refused.json()["detail"]) == (404, True)


def test_an_upstream_that_was_restarted_is_loaded_again(fleet: Fleet, tmp_path: Path) -> None:
    """On the same address, without its adapters: no sample fails for it."""
    write_adapter(tmp_path, "000100")
    host, (first, second) = start(fleet, tmp_path, upstreams=1)
    client = AdapterClient(first, "000100")
    old = fleet.upstreams[0]
    os.killpg(old.process.pid, signal.SIGKILL)
    old.process.wait(DEADLINE_S)
    again = fleet.start_upstream("--lora", "files", "--port", old.port)
    pending: list[tuple[Connection, str, dict[str, Any]]] = []
    for number in range(8):
        connection = (first, second)[number % 2]
        body = client.body(number, [*PROMPT, number])
        pending.append((connection, submit(connection, body)["request_id"], body))
    for connection, request_id, body in pending:
        result_of(connection, request_id, client, body)
    assert executions(again) == [8]
    assert host.counter("failed") == 0


def test_a_sample_whose_adapter_is_gone_waits_and_then_fails_in_words(fleet: Fleet, tmp_path: Path) -> None:
    """`queue_state` says meanwhile that it waits."""
    directory = write_adapter(tmp_path, "000100")
    # Many times what a poll takes: one is to see it wait.
    _, (first, _) = start(fleet, tmp_path, upstreams=1, lora_wait_s=8)
    client = AdapterClient(first, "000100")
    (directory / "adapter_config.json").unlink()
    assert call("POST", f"{fleet.upstreams[0].url}/v1/unload_lora_adapter", {"lora_name": client.model}).status == 200
    request_id = submit(first, client.body(1, PROMPT))["request_id"]
    says_it_waits(first, request_id)
    category, words = failure_of(first, request_id)
    assert category == "user"
    assert client.path in words
    assert "No adapter found" in words
    # Once the files are there again, so is the adapter.
    (directory / "adapter_config.json").touch()
    body = client.body(2, PROMPT)
    result_of(first, submit(first, body)["request_id"], client, body)


def test_an_upstream_that_cannot_load_it_is_passed_over(fleet: Fleet, tmp_path: Path) -> None:
    """One of two fails, in its way: the adapter is sampled at the other."""
    write_adapter(tmp_path, "000100")
    _, (first, _) = start(fleet, tmp_path)
    failing, steady = fleet.upstreams
    failing.script({"kind": "status", "status": 500, "path": "/v1/load_lora_adapter", "body": "rank 16 is too much"})
    client = AdapterClient(first, "000100")
    assert client.reply.status == 200
    for number in range(6):
        body = client.body(number, [*PROMPT, number])
        result_of(first, submit(first, body)["request_id"], client, body)
    assert executions(failing, steady) == [0, 6]
