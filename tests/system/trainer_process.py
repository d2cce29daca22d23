"""A small training server as the SDK knows them: promises, polls, sessions, weights; it trains nothing.

    python -m tests.system.trainer_process ENGINE_URL

prints the URL that it listens on. Saved weights are loaded into the engine as adapters under their run's name, which is
how a gateway without `--lora-path` finds them. Polls are answered with "try again" once before their result. What it
was asked is told by `GET /_calls`, one `{method, path, headers, size, digest}` each.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    Handler = Callable[[Request, Any], Awaitable[Response]]

API: Final = "/api/v1"
PROTOBUF: Final = "application/x-protobuf"
LOSS: Final = 0.25


@dataclass
class Future:
    result: dict[str, Any] | bytes
    polled: int = 0


@dataclass
class Trainer:
    engine_url: str
    sessions: dict[str, dict[str, int]] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    samplers: dict[str, dict[str, Any]] = field(default_factory=dict)
    futures: dict[str, Future] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def promise(self, result: dict[str, Any] | bytes, **more: Any) -> Response:
        request_id = f"future/{len(self.futures)}"
        self.futures[request_id] = Future(result)
        return JSONResponse({"request_id": request_id, **more})

    # -- sessions

    async def create_session(self, request: Request, asked: Any) -> Response:
        session_id = f"trainer-session-{len(self.sessions)}"
        self.sessions[session_id] = {"heartbeats": 0, "finished": 0}
        return JSONResponse({"session_id": session_id, "info_message": "welcome", "type": "create_session"})

    async def heartbeat(self, request: Request, asked: Any) -> Response:
        session = self.sessions.get(asked["session_id"])
        if session is None:
            return JSONResponse({"detail": "no such session"}, 404)
        session["heartbeats"] += 1
        return JSONResponse({}, 410 if session["finished"] else 200)

    async def finish(self, request: Request, asked: Any) -> Response:
        self.sessions[request.path_params["session_id"]]["finished"] += 1
        return JSONResponse({})

    # -- models

    async def create_model(self, request: Request, asked: Any) -> Response:
        model_id = f"{asked['session_id']}:train:{asked['model_seq_id']}"
        self.models[model_id] = asked["base_model"]
        return self.promise({"model_id": model_id, "type": "create_model"})

    async def get_info(self, request: Request, asked: Any) -> Response:
        base = self.models[asked["model_id"]]
        data = {"arch": "tiny", "model_name": base, "tokenizer_id": base}
        return JSONResponse({"model_data": data, "model_id": asked["model_id"], "is_lora": True, "lora_rank": 8})

    async def forward_backward(self, request: Request, asked: Any) -> Response:
        return self.promise(_forward_backward_output())

    async def optim_step(self, request: Request, asked: Any) -> Response:
        return self.promise({"metrics": {"lr": 1.0}})

    async def save_weights(self, request: Request, asked: Any) -> Response:
        path = f"tinker://{asked['model_id']}/weights/{asked['path']}"
        return self.promise({"path": path, "type": "save_weights"})

    async def load_weights(self, request: Request, asked: Any) -> Response:
        model_id = asked.get("model_id") or f"{asked['session_id']}:train:{asked['model_seq_id']}"
        self.models.setdefault(model_id, asked.get("base_model") or next(iter(self.models.values())))
        return self.promise({"path": asked["path"], "model_id": model_id, "type": "load_weights"})

    async def save_for_sampler(self, request: Request, asked: Any) -> Response:
        """As the hosted one: with a name the result is a path, without one a sampling session and nothing else."""
        model_id, number = asked["model_id"], asked.get("sampling_session_seq_id")
        name = asked.get("path") or f"ephemeral-{number}"
        path = f"tinker://{model_id}/sampler_weights/{name}"
        await self._load_into_engine(model_id)
        if asked.get("path") is not None:
            return self.promise({"path": path, "type": "save_weights_for_sampler"})
        session_id = model_id.rpartition(":train:")[0]
        sampler_id = f"{session_id}:sample:{number}"
        self.samplers[sampler_id] = {"sampler_id": sampler_id, "base_model": self.models[model_id], "model_path": path}
        return self.promise({"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"})

    async def sampler(self, request: Request, asked: Any) -> Response:
        known = self.samplers.get(request.path_params["sampler_id"])
        return JSONResponse(known or {"detail": "no such sampler"}, 200 if known else 404)

    async def _load_into_engine(self, name: str) -> None:
        async with aiohttp.ClientSession() as http:
            adapter = {"lora_name": name, "lora_path": f"/adapters/{name}"}
            async with http.post(f"{self.engine_url}/v1/load_lora_adapter", json=adapter) as reply:
                assert reply.status in (200, 400), await reply.text()

    # -- futures and the rest

    async def retrieve_future(self, request: Request, asked: Any) -> Response:
        future = self.futures.get(asked["request_id"])
        if future is None:
            return JSONResponse({"detail": "no such request"}, 404)
        future.polled += 1
        if future.polled == 1:
            again = {"type": "try_again", "request_id": asked["request_id"], "queue_state": "active"}
            return JSONResponse(again, 408)
        if isinstance(future.result, bytes):
            return Response(future.result, media_type=PROTOBUF)
        return JSONResponse(future.result)

    async def archive(self, request: Request, asked: Any) -> Response:
        return Response(status_code=302, headers={"Location": "https://storage.example/signed"})

    async def told(self, request: Request) -> Response:
        return JSONResponse({"calls": self.calls, "sessions": self.sessions, "samplers": self.samplers})

    def counted(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            body = await request.body()
            is_json = body and request.headers.get("content-type") == "application/json"
            self.calls.append(
                {
                    "method": request.method,
                    "path": request.url.path,
                    "headers": dict(request.headers),
                    "size": len(body),
                    "digest": sha256(body).hexdigest(),
                }
            )
            return await handler(request, await request.json() if is_json else None)

        return endpoint

    def app(self) -> Starlette:
        handlers: dict[str, Handler] = {
            "POST /create_session": self.create_session,
            "POST /session_heartbeat": self.heartbeat,
            "POST /sessions/{session_id}/finish": self.finish,
            "POST /create_model": self.create_model,
            "POST /get_info": self.get_info,
            "POST /forward_backward": self.forward_backward,
            "POST /optim_step": self.optim_step,
            "POST /save_weights": self.save_weights,
            "POST /load_weights": self.load_weights,
            "POST /save_weights_for_sampler": self.save_for_sampler,
            "GET /samplers/{sampler_id:path}": self.sampler,
            "POST /retrieve_future": self.retrieve_future,
            "GET /training_runs/{run}/checkpoints/{checkpoint:path}/archive": self.archive,
        }
        routes = [
            Route(API + path, self.counted(handler), methods=[method])
            for (method, path), handler in ((key.split(" "), handler) for key, handler in handlers.items())
        ]
        return Starlette(routes=[*routes, Route("/_calls", self.told)])


def _forward_backward_output() -> bytes:
    """`ForwardBackwardOutput` in protobuf: the type's name, one record of one datum without fields, one metric."""
    name = b"TorchLossReturn"
    record = b"\x18\x01"
    metric = b"\x0a\x08loss:sum\x11" + struct.pack("<d", LOSS)
    return b"".join(
        tag + bytes([len(value)]) + value for tag, value in ((b"\x0a", name), (b"\x12", record), (b"\x1a", metric))
    )


async def main(engine_url: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(Trainer(engine_url).app(), log_level="warning", lifespan="off")
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
