"""The public address: the Starlette application of a worker, and the table of hot paths."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from shared.config import MIB
from workers.api import openai, replies, results, sampling, sessions, training
from workers.api.endpoint import Endpoint, FixedReply, OpenAiEndpoint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request as StarletteRequest
    from starlette.types import Receive, Scope, Send

    from shared.counters import Counters
    from shared.http.exchange import HotEntry
    from shared.http.request import Request
    from workers.api.replies import Reply, Streamed
    from workers.parts import WorkerParts

    Route_ = tuple[str, str, Callable[[WorkerParts, Request], Awaitable[Reply | Streamed]]]

API: Final = "/api/v1"

HOT: Final[tuple[Route_, ...]] = (
    ("POST", "/asample", sampling.asample),
    ("POST", "/retrieve_future", results.retrieve_future),
    ("POST", "/retrieve_futures", results.retrieve_futures),
)
ROUTED: Final[tuple[Route_, ...]] = (
    ("POST", "/client/config", sessions.client_config),
    ("POST", "/client/dynamic_config", sessions.dynamic_config),
    ("POST", "/session_heartbeat", sessions.session_heartbeat),
    ("POST", "/create_session", sessions.create_session),
    ("POST", "/sessions/{session_id}/finish", sessions.finish_session),
    ("POST", "/create_sampling_session", sampling.create_sampling_session),
    ("POST", "/join_sampling_session", sampling.join_sampling_session),
    ("GET", "/samplers/{sampling_session_id}", sampling.sampler),
    ("POST", "/cancel_future", results.cancel_future),
    ("POST", "/telemetry", sessions.telemetry),
    ("GET", "/get_server_capabilities", sessions.server_capabilities),
)
# Read on the way to a training server; without one they are like all that is not ours.
TRAINED: Final[tuple[Route_, ...]] = (("POST", "/save_weights_for_sampler", training.save_weights_for_sampler),)

# What a training server answers, where there is one.
UNTRAINED: Final[tuple[Route_, ...]] = (("POST", "/weights_info", sampling.weights_info),)


OPENAI: Final[tuple[Route_, ...]] = (
    ("POST", "/v1/completions", openai.completions),
    ("POST", "/v1/chat/completions", openai.chat_completions),
    ("GET", "/v1/models", openai.models),
)

# The largest body of a path, in bytes; those that are not here take SMALL_BODY_BYTES, and none more than
# --max-body-bytes, which is the limit of prompts of tokens and images.
SMALL_BODY_BYTES: Final = 1 * MIB
BODY_BYTES: Final[dict[str, int | None]] = {
    "/asample": None,
    "/v1/completions": 16 * MIB,
    "/v1/chat/completions": 16 * MIB,
    # An acknowledgement each for 100,000 samples.
    "/retrieve_futures": 16 * MIB,
    # Discarded unread.
    "/telemetry": 16 * MIB,
}


class PublicApp:
    """The worker's Starlette application, and the table of hot paths, which is asked before it.

    Matching routes one by one costs as much as a whole small request does otherwise, so what every sample passes
    through is found by method and target. These paths are also those that requests come to in crowds: only so many go
    on in one turn of the event loop, so that health and heartbeats are answered in the midst of thousands.
    """

    def __init__(self, parts: WorkerParts) -> None:
        make = partial(_endpoint, parts)
        self.hot: dict[tuple[bytes, bytes], HotEntry] = {
            (method.encode(), f"{API}{path}".encode()): make(path, handler, in_turns=True)
            for method, path, handler in HOT
        }
        self.hot[b"GET", f"{API}/healthz".encode()] = FixedReply(sessions.HEALTHY, parts.counters)
        self.starlette = _starlette(make, parts.counters, (*ROUTED, *(UNTRAINED if parts.trainer is None else TRAINED)))
        self._elsewhere = make("", training.pass_on, streamed=True)
        self._nowhere = self.starlette.router.default
        self.starlette.router.default = self._not_ours

    async def _not_ours(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a path that no route has: the training server's, or nobody's."""
        is_api = scope["type"] == "http" and scope["path"].startswith(API + "/")
        await (self._elsewhere if is_api else self._nowhere)(scope, receive, send)


def _starlette(make: Callable[..., Endpoint], counters: Counters, routed: Sequence[Route_]) -> Starlette:
    routes = [Route(API + path, make(path, handler), methods=[method]) for method, path, handler in routed]
    # The hot ones again: a wrong method on them is a 405 like on any other, and they may have a query.
    routes += [Route(API + path, make(path, handler, in_turns=True), methods=[method]) for method, path, handler in HOT]
    routes += [
        Route(path, make(path, handler, kind=OpenAiEndpoint), methods=[method]) for method, path, handler in OPENAI
    ]
    routes.append(Route(API + "/healthz", make("/healthz", sessions.healthz, public=True), methods=["GET"]))
    app = Starlette(routes=routes, exception_handlers={HTTPException: partial(_http_error, counters)})
    # A redirect names what the client called us, and http:// behind a proxy that speaks TLS: the key would follow it.
    app.router.redirect_slashes = False
    return app


def _endpoint(
    parts: WorkerParts,
    path: str,
    handler: Callable[[WorkerParts, Request], Awaitable[Reply | Streamed]],
    *,
    kind: type[Endpoint] = Endpoint,
    public: bool = False,
    streamed: bool = False,
    in_turns: bool = False,
) -> Endpoint:
    return kind(
        partial(handler, parts),
        parts.live,
        parts.counters,
        BODY_BYTES.get(path, SMALL_BODY_BYTES),
        public=public,
        streamed=streamed,
        in_turns=in_turns,
    )


async def _http_error(counters: Counters, request: StarletteRequest, error: Exception) -> Response:
    """Answer what the router did not find: no such path, or not with this method. No endpoint has counted it."""
    assert isinstance(error, HTTPException)
    counters.http_requests += 1
    counters.answered(error.status_code)
    reply = replies.routing_error(error.status_code, in_openai=request.url.path.startswith("/v1/"))
    headers: dict[str, Any] = dict(error.headers or {})
    return Response(bytes(reply.body), reply.status, headers, reply.content_type.decode())
