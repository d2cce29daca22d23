"""What the gateway writes about what it does: never a key, a prompt, a token of a result, or a password."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from shared.wire.sdk.result import decode_sample_response
from tests.redis_server import RedisServer
from tests.system.http_calls import Connection, call
from tests.system.outcomes import result_of, settled
from tests.system.pinned import Client, submit
from tests.system.stack import Stack, running_stack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

API_KEY: Final = "tml-marked-api-key"
WRONG_KEY: Final = "tml-marked-wrong-key"
UPSTREAM_KEY: Final = "marked-upstream-key"
ADMIN_KEY: Final = "marked-admin-key"
REDIS_PASSWORD: Final = "marked-redis-password"
STOP: Final = "marked-stop"
QUERY: Final = "marked-query"
PROMPT: Final = [31_101, 31_102, 31_103]
SECRETS: Final = {
    "the API key": API_KEY,
    "its hash": sha256(API_KEY.encode()).hexdigest(),
    "a wrong API key": WRONG_KEY,
    "the upstream's key": UPSTREAM_KEY,
    "the admin key": ADMIN_KEY,
    "Redis' password": REDIS_PASSWORD,
    "a stop string": STOP,
    "a query": QUERY,
    "a prompt": "31101",
    "the rest of a prompt": "31103",
}
# Bodies that no decoder takes, each with a prompt in it.
BROKEN: Final = (
    b'{"prompt":{"chunks":[{"type":"encoded_text","tokens":[31101,31102,31103',
    b'{"prompt":{"chunks":[{"type":"encoded_text","tokens":[31101,"31103"]}]},"seq_id":1}',
    b'{"prompt":{"chunks":[{"type":"image","data":"31101 31103"}]},"seq_id":1}',
    b'{"sampling_session_id":31101,"seq_id":"31103"}',
    b'{"31101":1,"31101":2}',
)
# What a broken upstream answers: the client's own words among them.
FAULTS: Final[tuple[dict[str, Any], ...]] = (
    {"kind": "status", "status": 500, "body": '{"detail":"prompt 31101,31102,31103 marked-stop"}'},
    {"kind": "status", "status": 400, "body": '{"error":{"message":"no 31101,31103"}}'},
    {"kind": "html"},
    {"kind": "wrong_lengths"},
    {"kind": "reset_in_body"},
)


@dataclass
class Told:
    """Everything that came back or was written, by what it is."""

    texts: dict[str, str] = field(default_factory=dict)

    def add(self, what: str, text: str | bytes) -> None:
        words = text.decode("latin-1") if isinstance(text, bytes) else text
        self.texts[what] = self.texts.get(what, "") + words + "\n"


def _keep(directory: Path, name: str, text: str) -> str:
    path = directory / name
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """A gateway that says as much as it can, at the end of a busy life."""
    directory = tmp_path_factory.mktemp("redaction")
    entry = f'[[keys]]\nname = "alice"\nsha256 = "{SECRETS["its hash"]}"\n'
    with ExitStack() as ending:
        redis = RedisServer("--requirepass", REDIS_PASSWORD, tcp=True)
        ending.callback(redis.stop)
        flags = ["--log-level", "debug", "--access-log", "--max-reexecutions", "0", "--poll-timeout", "5"]
        flags += ["--redis-url", redis.url.replace("redis://", f"redis://:{REDIS_PASSWORD}@")]
        flags += ["--api-keys-file", _keep(directory, "keys.toml", entry)]
        flags += ["--upstream-api-key-file", _keep(directory, "upstream", UPSTREAM_KEY)]
        flags += ["--admin-key-file", _keep(directory, "admin", ADMIN_KEY)]
        stack = ending.enter_context(running_stack(directory, *flags))
        told = Told()
        connection = ending.enter_context(closing(stack.gateway.connect(API_KEY)))
        _sample(stack, connection, told)
        _mistakes(stack, connection, told)
        _operators(stack, told)
        stack.gateway.process.stop()
        for stream in ("out", "err"):
            told.add("log", (directory / f"gateway.{stream}").read_text())
        yield told


def _sample(stack: Stack, connection: Connection, told: Told) -> None:
    """One that works, and one for each way in which an upstream breaks."""
    client = Client(connection, stack.model)
    body = client.body(0, PROMPT, params={"max_tokens": 8, "stop": [STOP]})
    result = decode_sample_response(result_of(connection, submit(connection, body)["request_id"], client, body))
    tokens = np.frombuffer(result.sequences[0].tokens, "<i4").tolist()
    told.texts["tokens"] = ", ".join(map(str, tokens[:3]))
    for seq_id, fault in enumerate(FAULTS, 1):
        stack.simulator.script({**fault, "path": "/v1/completions"})
        promise = submit(connection, client.body(seq_id, PROMPT, params={"stop": [STOP]}))
        settled(connection, promise["request_id"])
    stack.simulator.script()


def _mistakes(stack: Stack, connection: Connection, told: Told) -> None:
    """What clients should not send; their own words come back to nobody."""
    for body in BROKEN:
        told.add("error bodies", connection.post("/api/v1/asample", body).body)
    told.add("error bodies", connection.get(f"/api/v1/healthz?key={QUERY}").body)
    told.add("error bodies", connection.get(f"/api/v1/nothing?key={QUERY}").body)
    telemetry = {"events": [{"event_data": {"request_headers": {"x-api-key": API_KEY}}}]}
    told.add("error bodies", connection.post("/api/v1/telemetry", telemetry).body)
    with closing(stack.gateway.connect(WRONG_KEY)) as stranger:
        told.add("error bodies", stranger.post("/api/v1/asample", BROKEN[1]).body)


def _operators(stack: Stack, told: Told) -> None:
    told.add("error bodies", call("GET", f"{stack.gateway.admin_url}/status").body)
    with closing(Connection(stack.gateway.admin_url, {"X-Admin-Key": ADMIN_KEY})) as admin:
        for path in ("/status", "/metrics", "/", "/readyz", "/livez", "/upstreams"):
            told.add("admin address", admin.get(path).body)


@pytest.mark.parametrize("what", SECRETS)
@pytest.mark.parametrize("where", ["log", "error bodies", "admin address"])
def test_no_secret_is_told(told: Told, where: str, what: str) -> None:
    assert len(told.texts[where]) > 100, "there is something to look through"
    assert SECRETS[what] not in told.texts[where]


def test_no_result_is_told(told: Told) -> None:
    tokens = told.texts["tokens"]
    assert tokens.count(",") == 2
    for form in (tokens, tokens.replace(" ", "")):
        assert all(form not in text for what, text in told.texts.items() if what != "tokens")


def test_what_happened_is_told(told: Told) -> None:
    """The log was on."""
    assert "/api/v1/asample" in told.texts["log"]
    assert "DEBUG" in told.texts["log"]
