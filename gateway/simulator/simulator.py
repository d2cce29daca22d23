"""The simulated vLLM: its endpoints, faults and counts. It runs on the event loop that starts it.

async with Simulator(SimulatorConfig()) as simulator:
    simulator.url; simulator.stats(); simulator.set_faults([{"kind": "status", "status": 503, "next": 3}])
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any, Final

import orjson

from gateway.simulator import adapters, chat_api, completion, faults, generate_api, render
from gateway.simulator import ask as asking
from gateway.simulator import tokens as oracle
from gateway.simulator.ask import Ask, Refused, ServedModels
from gateway.simulator.gate import make_gate
from gateway.simulator.http import Dropped, HttpConnection, HttpReply, HttpRequest, Reset
from gateway.simulator.listener import ListeningAddress, bind
from gateway.simulator.misbehaviour import spoil
from gateway.simulator.siblings import Siblings
from gateway.simulator.stats import Stats, Traffic, report, sample_id
from shared.core.logprobs_check import PROBE_REQUEST_ID

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from gateway.simulator.completion import Choice
    from gateway.simulator.config import SimulatorConfig
    from gateway.simulator.faults import ScriptedFault

    Route = Callable[[HttpRequest], Awaitable[HttpReply]]

_NEVER_S: Final = 10**9
_LOAD: Final = "/v1/load_lora_adapter"
_GENERATE: Final = "/inference/v1/generate"
_CHAT: Final = "/v1/chat/completions"
# Requests that all processes of a simulator must carry out.
_FOR_ALL: Final = frozenset(
    {
        ("POST", _LOAD),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/_sim/faults"),
        ("DELETE", "/_sim/faults"),
        ("POST", "/_sim/release"),
        ("POST", "/_sim/reset"),
    }
)


_FIXED_REPLIES: Final = {
    ("GET", "/health"): HttpReply(),
    ("GET", "/ping"): HttpReply(),
    ("GET", "/version"): HttpReply(body=b'{"version":"0.32.0"}'),
}


class Simulator:
    """One process of the simulated vLLM.

    `listener` is a bound socket to use instead of the configured address; `siblings` are its other processes, if any.
    """

    def __init__(
        self, config: SimulatorConfig, listener: socket.socket | None = None, siblings: Siblings | None = None
    ) -> None:
        self._config = config
        self._bound = listener
        self._siblings = siblings or Siblings()
        self._listener: ListeningAddress | None = None
        self._control: asyncio.Server | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._connections: set[HttpConnection] = set()
        self._gate = make_gate(config)
        self._rules: list[faults.Rule] = []
        self._stats = Stats()
        self._adapters = adapters.LoadedAdapters(config.models, config.lora)
        self._served = ServedModels(config.models, self._adapters.paths, config.max_model_len)
        self._rng = random.Random()
        self._draining = False
        self._released = asyncio.Event()
        self._routes: dict[tuple[str, str], Route] = {
            ("POST", "/v1/completions"): self._complete,
            ("POST", _GENERATE): self._complete,
            ("POST", _CHAT): self._complete,
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
            ("POST", _LOAD): self._load_adapter,
            ("POST", "/v1/unload_lora_adapter"): self._change_adapters,
            ("GET", "/_sim/stats"): self._send_stats,
            ("GET", "/_sim/snapshot"): self._send_snapshot,
            ("POST", "/_sim/faults"): self._take_faults,
            ("DELETE", "/_sim/faults"): self._take_faults,
            ("POST", "/_sim/release"): self._release,
            ("POST", "/_sim/reset"): self._reset,
        }

    # -- life

    async def start(self, control_path: Path | None = None) -> None:
        """Listen for clients, and on `control_path` for siblings, if there are any. Raises `OSError`."""
        bound = self._bound or bind(self._config.host, self._config.port)
        self._listener = ListeningAddress(bound, self._connect, self._config.backlog)
        await self._listener.open()
        if control_path is not None:
            loop = asyncio.get_running_loop()
            self._control = await loop.create_unix_server(self._connect_sibling, str(control_path))

    def _connect(self) -> HttpConnection:
        return HttpConnection(self._handle, self._connections, self._config.keep_alive_s, self._stats.traffic)

    def _connect_sibling(self) -> HttpConnection:
        return HttpConnection(self._handle_here, set(), self._config.keep_alive_s, Traffic())

    async def stop(self) -> None:
        if self._reopening is not None:
            self._reopening.cancel()
            await asyncio.gather(self._reopening, return_exceptions=True)
        for server in (self._listener, self._control):
            if server is not None:
                server.close()
        tasks = [connection.stop() for connection in list(self._connections)]
        await asyncio.gather(*[task for task in tasks if task is not None], return_exceptions=True)
        # The loop calls connection_lost of aborted transports in its next turn.
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
        return self._listener.url

    def stats(self) -> dict[str, Any]:
        """Return the document of `/_sim/stats` for this process."""
        return report([self._snapshot()])

    def _snapshot(self) -> dict[str, Any]:
        self._stats.connections = len(self._connections)
        return self._stats.snapshot()

    def set_faults(self, rules: Any) -> None:
        """Replace the faults. Raises `ValueError` if a rule is not understood."""
        read = faults.read_rules(rules)
        self._rules = [rule for rule in read if rule.fault.kind not in faults.SERVER_KINDS]
        for rule in read:
            if rule.fault.kind == "drain":
                self._drain()
            elif rule.fault.kind == "slow_accept":
                self._accept_nobody_for(rule.fault.delay_s)

    # -- requests

    async def _handle(self, request: HttpRequest) -> HttpReply:
        """Handle a client's request; one that concerns all processes goes to the others first."""
        self._stats.adapter_loads += request.path == _LOAD
        if (request.method, request.path) in _FOR_ALL:
            await self._siblings.ask(request)
        return await self._handle_here(request)

    async def _handle_here(self, request: HttpRequest) -> HttpReply:
        route = self._routes.get((request.method, request.path))
        if self._draining:
            await asyncio.sleep(_NEVER_S)
        if route is None:
            fixed = _FIXED_REPLIES.get((request.method, request.path))
            return fixed or _json({"detail": "Not Found"}, 404)
        try:
            return await route(request)
        except Refused as refused:
            return _json(refused.body, refused.status)

    async def _complete(self, request: HttpRequest) -> HttpReply:
        if request.path == _GENERATE and not self._config.scale_out:
            return _json({"detail": "Forbidden"}, 403)
        request_id = request.headers.get("x-request-id", "")
        if request_id == PROBE_REQUEST_ID:
            return self._answer_probe(request)
        self._stats.receive(request.peer)
        document = asking.parse(request.body)
        model = str(document.get("model", "")) if isinstance(document, dict) else ""
        fault = faults.choose(self._rules, request.path, model, request_id)
        early = await self._before_execution(fault)
        if early is not None:
            return early
        ask = self._read(request.path, document)
        reply_id = request_id or f"{self._rng.getrandbits(64):016x}"
        if request.path == _CHAT and chat_api.wants_stream(document):
            executing = self._execute(ask, sample_id(request_id), fault)
            return HttpReply(
                content_type="text/event-stream; charset=utf-8",
                stream=_events(ask, executing, reply_id, usage=chat_api.wants_usage(document)),
            )
        choices = await self._execute(ask, sample_id(request_id), fault)
        return spoil(self._reply(request.path, ask, choices, reply_id), fault)

    def _read(self, path: str, document: Any) -> Ask:
        """Validate a request to one of the three generating paths. Raises `Refused`."""
        if path == _GENERATE:
            return generate_api.read(document, self._served, self._config.max_num_seqs)
        if path == _CHAT:
            return chat_api.read(document, self._served)
        return asking.read_ask(document, self._served)

    def _reply(self, path: str, ask: Ask, choices: list[Choice], reply_id: str) -> HttpReply:
        write = {_GENERATE: generate_api.render, _CHAT: chat_api.render}.get(path, render.completion)
        return HttpReply(body=write(ask, choices, reply_id, int(time.time())))

    def _answer_probe(self, request: HttpRequest) -> HttpReply:
        """Answer the gateway's own probe, which is no sample: it is not counted, held or spoiled."""
        ask = self._read(request.path, asking.parse(request.body))
        choices = completion.generate(ask, 0, raw_logprobs=self._config.raw_logprobs)
        return self._reply(request.path, ask, choices, PROBE_REQUEST_ID)

    async def _before_execution(self, fault: ScriptedFault | None) -> HttpReply | None:
        """Carry out a fault that comes before generation, and return its reply, if it has one."""
        if fault is None:
            return None
        if fault.kind == "reset_before_read":
            raise Reset
        if fault.kind == "status":
            await asyncio.sleep(fault.delay_s)
            return _scripted(fault)
        return None

    async def _execute(self, ask: Ask, sample: str, fault: ScriptedFault | None) -> list[Choice]:
        started = False

        def start() -> None:
            nonlocal started
            started = True
            self._stats.waiting -= 1
            self._stats.start(sample)

        finished = False
        self._stats.waiting += 1
        try:
            await self._gate.generate(start)
            if fault is not None:
                await self._misbehave_while_running(fault)
            finished = True
        finally:
            if started:
                self._stats.end(sample, aborted=not finished)
            else:
                self._stats.waiting -= 1
        fresh_seed = self._rng.randrange(oracle.UNSEEDED)
        return completion.generate(ask, fresh_seed, raw_logprobs=self._config.raw_logprobs)

    async def _misbehave_while_running(self, fault: ScriptedFault) -> None:
        if fault.kind == "delay":
            await asyncio.sleep(fault.delay_s)
        elif fault.kind == "hold":
            await self._released.wait()
        elif fault.kind == "hang":
            await asyncio.sleep(_NEVER_S)
        elif fault.kind == "reset_before_status":
            await asyncio.sleep(fault.delay_s)
            raise Dropped

    # -- the rest of vLLM

    async def _models(self, request: HttpRequest) -> HttpReply:
        return _json(render.models(self._served, self._adapters.paths, int(time.time())))

    async def _metrics(self, request: HttpRequest) -> HttpReply:
        text = render.metrics(self._config.models[0], self._stats)
        return HttpReply(body=text.encode(), content_type="text/plain; version=0.0.4")

    async def _load_adapter(self, request: HttpRequest) -> HttpReply:
        fault = faults.choose_named(self._rules, request.path, adapters.name_in(request.body))
        early = await self._before_execution(fault)
        if early is not None:
            return early
        if fault is not None:
            await self._misbehave_while_running(fault)
        return await self._change_adapters(request)

    async def _change_adapters(self, request: HttpRequest) -> HttpReply:
        if not self._adapters.enabled:
            return _json({"detail": "Not Found"}, 404)
        change = self._adapters.load if request.path == _LOAD else self._adapters.unload
        return HttpReply(200, change(asking.parse(request.body)).encode(), "text/plain; charset=utf-8")

    # -- its control paths

    async def _send_stats(self, request: HttpRequest) -> HttpReply:
        asked = HttpRequest("GET", "/_sim/snapshot", {}, b"", "")
        others = [orjson.loads(body) for body in await self._siblings.ask(asked)]
        return _json(report([self._snapshot(), *others]))

    async def _send_snapshot(self, request: HttpRequest) -> HttpReply:
        """Send the counts of this process to a sibling."""
        return _json(self._snapshot())

    async def _take_faults(self, request: HttpRequest) -> HttpReply:
        try:
            self.set_faults(asking.parse(request.body) if request.method == "POST" else [])
        except ValueError as error:
            return _json({"detail": str(error)}, 400)
        return _json({"faults": len(self._rules)})

    async def _release(self, request: HttpRequest) -> HttpReply:
        self._gate.release()
        released, self._released = self._released, asyncio.Event()
        released.set()
        return _json({})

    async def _reset(self, request: HttpRequest) -> HttpReply:
        """Remove all faults and count from zero; requests that are running still count as running."""
        self._rules = []
        self._stats.clear()
        return _json({})

    def _drain(self) -> None:
        """Close the listening socket and send nothing more on open connections, as vLLM does after SIGTERM."""
        self._draining = True
        if self._listener is not None:
            self._listener.close()

    def _accept_nobody_for(self, delay_s: float) -> None:
        if self._listener is not None and self._reopening is None:
            self._listener.pause()
            self._reopening = asyncio.get_running_loop().create_task(self._reopen_after(self._listener, delay_s))

    async def _reopen_after(self, listener: ListeningAddress, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        if not self._draining:
            await listener.open()
        self._reopening = None


async def _events(ask: Ask, executing: Awaitable[list[Choice]], reply_id: str, *, usage: bool) -> AsyncIterator[bytes]:
    """Yield the events of a stream; the generation runs while the stream is read, and ends with its reader."""
    for event in chat_api.events(ask, await executing, reply_id, int(time.time()), usage=usage):
        yield event
    yield chat_api.END


def _scripted(fault: ScriptedFault) -> HttpReply:
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
