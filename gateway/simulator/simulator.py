"""The simulated vLLM itself: endpoints, faults, counts. Runs on the loop that starts it.

async with Simulator(SimulatorConfig()) as simulator:
    simulator.url; simulator.stats(); simulator.set_faults([{"kind": "status", "status": 503, "next": 3}])
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from typing import TYPE_CHECKING, Any, Final

import orjson

from gateway.simulator import completion, faults, generate_api, render
from gateway.simulator import tokens as oracle
from gateway.simulator.completion import Ask, Choice, Refused
from gateway.simulator.gate import make_gate
from gateway.simulator.http import HttpConnection, HttpReply, HttpRequest, Reset
from gateway.simulator.misbehaviour import spoil
from gateway.simulator.stats import Stats, sample_id
from shared.core.scaling import PROBE_REQUEST_ID

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType
    from typing import Self

    from gateway.simulator.config import SimulatorConfig
    from gateway.simulator.faults import Fault

    Route = Callable[[HttpRequest], Awaitable[HttpReply]]

_NEVER_S: Final = 10**9


class Simulator:
    def __init__(self, config: SimulatorConfig, listener: socket.socket | None = None) -> None:
        self._config = config
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._connections: set[HttpConnection] = set()
        self._gate = make_gate(config)
        self._rules: list[faults.Rule] = []
        self._stats = Stats()
        self._adapters: dict[str, str] = {}
        self._rng = random.Random()
        self._draining = False
        self._released = asyncio.Event()
        self._completions: dict[str, Route] = {
            "/v1/completions": self._complete,
            "/inference/v1/generate": self._complete,
        }
        self._routes: dict[tuple[str, str], Route] = {
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._empty,
            ("GET", "/ping"): self._empty,
            ("GET", "/version"): self._version,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/v1/load_lora_adapter"): self._load_adapter,
            ("POST", "/v1/unload_lora_adapter"): self._unload_adapter,
            ("GET", "/_sim/stats"): self._tell_stats,
            ("POST", "/_sim/faults"): self._take_faults,
            ("DELETE", "/_sim/faults"): self._clear_faults,
            ("POST", "/_sim/release"): self._release,
            ("POST", "/_sim/reset"): self._reset,
        }

    # -- life

    async def start(self) -> None:
        if self._listener is None:
            self._listener = bind(self._config.host, self._config.port)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: HttpConnection(self._handle, self._connections, self._config.keep_alive_s),
            sock=self._listener,
            backlog=self._config.backlog,
        )

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.stop()
        self._gate.release()
        await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        assert self._listener is not None
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def stats(self) -> dict[str, Any]:
        self._stats.connections = len(self._connections)
        return self._stats.report()

    def set_faults(self, rules: Any) -> None:
        """Replace the script. Raises `ValueError` when it is not understood."""
        self._rules = faults.read_rules(rules)
        if any(rule.fault.kind == "drain" for rule in self._rules):
            self._drain()

    # -- requests

    async def _handle(self, request: HttpRequest) -> HttpReply:
        route = self._completions.get(request.path) if request.method == "POST" else None
        route = route or self._routes.get((request.method, request.path))
        if self._draining:
            await asyncio.sleep(_NEVER_S)
        if route is None:
            return _json({"detail": "Not Found"}, 404)
        try:
            return await route(request)
        except Refused as refused:
            return _json(refused.body, refused.status)

    async def _complete(self, request: HttpRequest) -> HttpReply:
        request_id = request.headers.get("x-request-id", "")
        if request_id == PROBE_REQUEST_ID:
            return self._answer_probe(request)
        self._stats.receive(request.peer)
        document = _document(request.body)
        model = str(document.get("model", "")) if isinstance(document, dict) else ""
        fault = faults.choose(self._rules, request.path, model, request_id)
        early = await self._before_execution(fault)
        if early is not None:
            return early
        if request.path != "/v1/completions":
            document = generate_api.as_completion(document)
        ask = completion.read_ask(document, self._served(), self._config.max_model_len)
        choices = await self._execute(ask, sample_id(request_id), fault)
        told_id = request_id or f"{self._rng.getrandbits(64):016x}"
        if request.path == "/v1/completions":
            body = render.completion(ask, choices, told_id, int(time.time()))
        else:
            body = generate_api.render(ask, choices, told_id, int(time.time()))
        return spoil(HttpReply(body=body), fault)

    def _answer_probe(self, request: HttpRequest) -> HttpReply:
        """The gateway's own question about logprobs is no sample: not counted, not held, not misbehaved towards."""
        ask = completion.read_ask(_document(request.body), self._served(), self._config.max_model_len)
        choices = completion.generate(ask, 0, raw_logprobs=self._config.raw_logprobs)
        return HttpReply(body=render.completion(ask, choices, PROBE_REQUEST_ID, int(time.time())))

    async def _before_execution(self, fault: Fault | None) -> HttpReply | None:
        """Misbehaviour that happens without any generation; its reply, if it has one."""
        if fault is None:
            return None
        if fault.kind == "reset_before_read":
            raise Reset
        if fault.kind == "status":
            await asyncio.sleep(fault.delay_s)
            return _scripted(fault)
        return None

    async def _execute(self, ask: Ask, sample: str, fault: Fault | None) -> list[Choice]:
        started = False

        def start() -> None:
            nonlocal started
            started = True
            self._stats.start(sample)

        finished = False
        try:
            await self._gate.generate(start)
            if fault is not None:
                await self._misbehave_while_running(fault)
            finished = True
        finally:
            if started:
                self._stats.end(sample, aborted=not finished)
        fresh_seed = self._rng.randrange(oracle.UNSEEDED)
        return completion.generate(ask, fresh_seed, raw_logprobs=self._config.raw_logprobs)

    async def _misbehave_while_running(self, fault: Fault) -> None:
        if fault.kind == "delay":
            await asyncio.sleep(fault.delay_s)
        elif fault.kind == "hold":
            await self._released.wait()
        elif fault.kind == "hang":
            await asyncio.sleep(_NEVER_S)
        elif fault.kind == "reset_before_status":
            await asyncio.sleep(fault.delay_s)
            raise Reset

    def _served(self) -> frozenset[str]:
        return frozenset((*self._config.models, *self._adapters))

    # -- the rest of vLLM

    async def _models(self, request: HttpRequest) -> HttpReply:
        adapters = [(name, self._config.models[0], path) for name, path in self._adapters.items()]
        return _json(render.models(self._config.models, adapters, self._config.max_model_len))

    async def _empty(self, request: HttpRequest) -> HttpReply:
        return HttpReply()

    async def _version(self, request: HttpRequest) -> HttpReply:
        return _json({"version": "0.32.0"})

    async def _metrics(self, request: HttpRequest) -> HttpReply:
        text = f"vllm:num_requests_running {self._stats.in_flight}\nvllm:num_requests_waiting 0\n"
        return HttpReply(body=text.encode(), content_type="text/plain; version=0.0.4")

    async def _load_adapter(self, request: HttpRequest) -> HttpReply:
        name, path = _adapter(request.body)
        if name in self._adapters:
            raise Refused(
                400,
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
                "set 'load_inplace' to True.",
                "InvalidUserInput",
            )
        self._adapters[name] = path
        return _text(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: HttpRequest) -> HttpReply:
        name, _ = _adapter(request.body)
        if name not in self._adapters:
            raise Refused(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        del self._adapters[name]
        return _text(f"Success: LoRA adapter '{name}' removed successfully.")

    # -- its control paths

    async def _tell_stats(self, request: HttpRequest) -> HttpReply:
        return _json(self.stats())

    async def _take_faults(self, request: HttpRequest) -> HttpReply:
        try:
            self.set_faults(_document(request.body))
        except ValueError as error:
            return _json({"detail": str(error)}, 400)
        return _json({"faults": len(self._rules)})

    async def _clear_faults(self, request: HttpRequest) -> HttpReply:
        self._rules = []
        return _json({"faults": 0})

    async def _release(self, request: HttpRequest) -> HttpReply:
        self._gate.release()
        released, self._released = self._released, asyncio.Event()
        released.set()
        return _json({})

    async def _reset(self, request: HttpRequest) -> HttpReply:
        self._rules = []
        self._stats = Stats()
        return _json({})

    def _drain(self) -> None:
        """As vLLM after SIGTERM: the listening socket is closed, open connections stay without a byte."""
        self._draining = True
        if self._server is not None:
            self._server.close()
            self._server = None


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """The simulator's listening address, not yet listening. Raises `OSError`."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind((host, port))
    return bound


def _document(body: bytes) -> Any:
    try:
        return orjson.loads(body) if body else {}
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"Invalid JSON: {error}", "Bad Request") from None


def _adapter(body: bytes) -> tuple[str, str]:
    document = _document(body)
    name = document.get("lora_name") if isinstance(document, dict) else None
    if not name:
        raise Refused(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
    return str(name), str(document.get("lora_path", ""))


def _scripted(fault: Fault) -> HttpReply:
    body = fault.options.get("body", "")
    text = isinstance(body, str)
    return HttpReply(
        int(fault.options.get("status", 500)),
        body.encode() if isinstance(body, str) else orjson.dumps(body),
        "text/plain; charset=utf-8" if text else "application/json",
        {str(name): str(value) for name, value in fault.options.get("headers", {}).items()},
    )


def _json(document: Any, status: int = 200) -> HttpReply:
    return HttpReply(status, orjson.dumps(document))


def _text(words: str) -> HttpReply:
    return HttpReply(200, words.encode(), "text/plain; charset=utf-8")
