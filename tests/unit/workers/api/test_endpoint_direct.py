"""The same boundary for requests that come without ASGI: who calls, what is refused unread, what is counted."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from shared.core.callers import ANONYMOUS, ApiKey, Keyring
from shared.core.errors import BadRequest, BodyTooLarge, GatewayError, Overloaded, Unauthorized, UnsupportedEncoding
from shared.counters import Counters
from shared.http.peer import Connection
from workers.api.endpoint import Endpoint
from workers.api.replies import Reply, Streamed

if TYPE_CHECKING:
    from starlette.types import Scope

    from shared.http.request import Request

KEYS = Keyring([ApiKey("a", sha256(b"tml-a").hexdigest())])
TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Arrived:
    """What the edge hands over."""

    caller: Any = ANONYMOUS
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b"{}"
    path: str = "/x"
    connection: Connection = field(default_factory=Connection)

    def scope(self) -> Scope:
        return {"type": "http", "path": self.path, "raw_path": b"/x", "headers": list(self.headers.items())}


@dataclass
class Handler:
    outcome: Reply | Streamed | Exception = field(default_factory=lambda: Reply(200, b"fine"))
    seen: list[Request] = field(default_factory=list)

    async def __call__(self, request: Request) -> Reply | Streamed:
        self.seen.append(request)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def endpoint_of(handler: Handler, keyring: Keyring | None = None) -> tuple[Endpoint, Counters]:
    counters, chosen = Counters(), keyring or Keyring(None)
    return Endpoint(handler, lambda: chosen, counters, lambda: 100), counters


@pytest.mark.parametrize(
    ("headers", "refused_as"),
    [
        ({}, Unauthorized),
        ({b"x-api-key": b"tml-b"}, Unauthorized),
        ({b"x-api-key": b"tml-a", b"content-length": b"101"}, BodyTooLarge),
        ({b"x-api-key": b"tml-a", b"content-length": b"1", b"content-encoding": b"gzip"}, UnsupportedEncoding),
    ],
)
def test_who_and_what_is_refused_unread(headers: dict[bytes, bytes], refused_as: type[GatewayError]) -> None:
    endpoint, counters = endpoint_of(Handler(), KEYS)
    with pytest.raises(refused_as) as caught:
        endpoint.admit(headers)
    reply = endpoint.refused(caught.value, "/x")
    assert 400 <= reply.status < 500 and json.loads(bytes(reply.body))["detail"]
    assert (counters.http_requests, counters.http_client_errors) == (1, 1)


def test_a_known_key_is_admitted() -> None:
    endpoint, counters = endpoint_of(Handler(), KEYS)
    assert endpoint.admit({b"x-api-key": b"tml-a", b"content-length": b"100"}).name == "a"
    assert counters.http_requests == 1


async def test_the_handler_gets_what_it_gets_by_asgi() -> None:
    handler = Handler()
    endpoint, _ = endpoint_of(handler)
    arrived = Arrived(headers={b"accept": b"application/x-protobuf", b"traceparent": TRACE})
    assert await endpoint.answered(arrived) == Reply(200, b"fine")  # type: ignore[arg-type] # all that is looked at
    (request,) = handler.seen
    assert (request.body, request.accept, request.path) == (b"{}", b"application/x-protobuf", {})
    assert request.connection is arrived.connection
    assert request.trace == TRACE.decode()
    assert request.scope() == arrived.scope()
    assert (await request.receive())["type"] == "http.disconnect"


@pytest.mark.parametrize(
    ("error", "status"),
    [(BadRequest("no"), 400), (Overloaded("upstream", "later"), 429), (RuntimeError("a defect"), 429)],
)
async def test_what_a_handler_raises_is_a_reply(error: Exception, status: int) -> None:
    endpoint, counters = endpoint_of(Handler(error))
    reply = await endpoint.answered(Arrived())  # type: ignore[arg-type] # as above
    assert isinstance(reply, Reply) and reply.status == status
    assert counters.rejected_upstream == isinstance(error, Overloaded)
    assert counters.rejected_unexpected == isinstance(error, RuntimeError)


async def test_a_reply_in_parts_is_an_application() -> None:
    async def run(send: Any) -> None:
        await send({"type": "http.response.start", "status": 502, "headers": []})

    endpoint, counters = endpoint_of(Handler(Streamed(run)))
    app = await endpoint.answered(Arrived())  # type: ignore[arg-type] # as above
    assert callable(app)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await app(Arrived().scope(), _nothing, send)
    assert [message["status"] for message in sent] == [502]
    assert counters.http_server_errors == 1


async def _nothing() -> Any:
    return {"type": "http.disconnect"}


def test_a_client_that_left_is_counted_as_its_error() -> None:
    endpoint, counters = endpoint_of(Handler())
    endpoint.client_left("/x")
    assert counters.http_client_errors == 1
