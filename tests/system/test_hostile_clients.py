"""What reaches further than one decoder: bombs, ids that would be headers or keys, addresses of somebody's choice."""

from __future__ import annotations

import http.server
import struct
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import pytest

from tests.redis_server import RedisServer, running_redis
from tests.system.outcomes import failure_of, result_of
from tests.system.pinned import Client, submit
from tests.system.stack import Gateway, running_stack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.system.http_calls import Connection
    from tests.system.stack import Stack

pytestmark = pytest.mark.slow

MIB: Final = 1024 * 1024
PREFIX: Final = "gw"
# What would end a header, split a key of a cluster, or end a command of Redis.
HOSTILE: Final = (
    "a\r\nX-Injected: 1",
    "a\x00b",
    "{a}",
    "gws-{" + "A" * 31,
    "*",
    "a b",
    "../../v1/models",
    "\u202e\U0001f4a5",
    "x" * 100_000,
    "gwss-" + "A" * 32 + ".gws-" + "A" * 32 + ".bQQ",
    "gwss-" + "A" * 32 + ".gws-" + "A" * 32 + ".bQQ:1\r\nDEL gw",
)


def zstd_bomb(content_bytes: int) -> bytes:
    """A frame of zeros that declares its size: blocks of 128 KiB, each a byte to be repeated (RFC 8878)."""
    block_bytes = 128 * 1024
    count = content_bytes // block_bytes
    blocks = [
        ((block_bytes << 3) | (1 << 1) | (number == count - 1)).to_bytes(3, "little") + b"\0" for number in range(count)
    ]
    return b"\x28\xb5\x2f\xfd" + b"\xa0" + struct.pack("<I", content_bytes) + b"".join(blocks)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, redis: RedisServer) -> Iterator[Stack]:
    flags = ["--redis-url", redis.url, "--poll-timeout", "1"]
    with running_stack(tmp_path_factory.mktemp("hostile"), *flags) as stack:
        yield stack
        assert "Traceback" not in stack.gateway.process.log


@pytest.fixture
def connection(stack: Stack) -> Iterator[Connection]:
    with closing(stack.gateway.connect()) as connection:
        yield connection


def resident_bytes(stack: Stack) -> int:
    return max(int(worker["rss_bytes"]) for worker in stack.gateway.workers())


@pytest.mark.parametrize("path", ["/asample", "/create_session", "/retrieve_future", "/telemetry"])
def test_a_frame_that_says_how_large_it_becomes_is_not_believed(
    stack: Stack, connection: Connection, path: str
) -> None:
    """50 MiB in 1.6 KB: nothing is unpacked at all, since no SDK packs what comes here."""
    bomb = zstd_bomb(50 * MIB)
    assert len(bomb) < 1700
    before = resident_bytes(stack)
    reply = connection.post("/api/v1" + path, bomb, Content_Encoding="zstd")
    assert reply.status == 415
    assert resident_bytes(stack) < before + 25 * MIB


def names_in(redis: RedisServer) -> set[bytes]:
    return set(redis.command("KEYS", "*").split(b"\r\n")[2::2])


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_an_id_that_is_not_ours_reaches_neither_redis_nor_the_upstream(
    stack: Stack, connection: Connection, redis: RedisServer, text: str
) -> None:
    """A7"""
    Client(connection, stack.model)  # what lives of itself is there before we look
    asked = stack.simulator.stats()["received"]
    before = names_in(redis)
    sample = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "seq_id": 1}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("asample", {**sample, "sampling_session_id": text}),
        ("retrieve_future", {"request_id": text}),
        ("cancel_future", {"request_id": text}),
        ("session_heartbeat", {"session_id": text}),
        ("create_sampling_session", {"session_id": text, "base_model": stack.model}),
        ("join_sampling_session", {"sampling_session_id": text}),
        (f"sessions/{quote(text[:1000], safe='')}/finish", {}),
    ]
    for path, body in bodies:
        reply = connection.post(f"/api/v1/{path}", body)
        # 410: a well-formed id that nobody knows tells nothing either. 501: with slashes it is another path.
        assert reply.status in (400, 404, 410, 501), (path, reply)
        assert b"X-Injected" not in reply.body
    assert connection.get(f"/api/v1/samplers/{quote(text[:1000], safe='')}").status in (404, 501)
    assert names_in(redis) <= before
    assert stack.simulator.stats()["received"] == asked


@pytest.mark.parametrize("name", ["a\r\nX-Injected: 1", "../../etc/passwd", "http://127.0.0.1:9/", "{a}", "a\x00"])
def test_a_models_name_is_looked_up_and_nothing_else(stack: Stack, connection: Connection, name: str) -> None:
    session_id = Client(connection, stack.model).session_id
    for named in ({"base_model": name}, {"model_path": f"tinker://{name}/sampler_weights/{name}"}):
        reply = connection.post("/api/v1/create_sampling_session", {"session_id": session_id, **named})
        assert reply.status in (400, 404), reply
    assert set(stack.simulator.stats()["by_source_ip"]) <= {"127.0.0.1", "127.0.0.2", "127.0.0.3"}


def test_an_image_that_is_elsewhere_is_not_fetched(stack: Stack, connection: Connection) -> None:
    asked = stack.simulator.stats()["received"]
    client = Client(connection, stack.model)
    pointer = {"type": "image_asset_pointer", "location": f"{stack.simulator.url}/secret.png", "format": "png"}
    body = {**client.body(1, [1]), "prompt": {"chunks": [pointer]}}
    reply = connection.post("/api/v1/asample", body)
    assert reply.status == 400
    assert stack.simulator.stats()["received"] == asked


class _Elsewhere(http.server.BaseHTTPRequestHandler):
    """Where an upstream would like to send us."""

    def do_POST(self) -> None:
        self.server.asked = True  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_of_an_upstream_is_not_followed(stack: Stack, connection: Connection, status: int) -> None:
    elsewhere = http.server.HTTPServer(("127.0.0.1", 0), _Elsewhere)
    elsewhere.asked = False  # type: ignore[attr-defined]
    serving = threading.Thread(target=elsewhere.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    try:
        location = f"http://127.0.0.1:{elsewhere.server_port}/v1/completions"
        fault = {"kind": "status", "status": status, "headers": {"Location": location}, "path": "/v1/completions"}
        stack.simulator.script(fault)
        client = Client(connection, stack.model)
        category, _ = failure_of(connection, submit(connection, client.body(1, [1]))["request_id"])
        assert category == "server"
        assert not elsewhere.asked  # type: ignore[attr-defined]
    finally:
        stack.simulator.script()
        elsewhere.shutdown()
        serving.join()
        elsewhere.server_close()


def test_a_proxy_of_the_environment_gets_nothing(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    gateway = Gateway(tmp_path, stack.simulator.url, "--workers", "1")
    try:
        with closing(gateway.connect()) as connection:
            client = Client(connection, stack.model)
            body = client.body(1, [5, 6])
            result_of(connection, submit(connection, body)["request_id"], client, body)
    finally:
        gateway.close()
