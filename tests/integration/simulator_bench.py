"""A simulated vLLM on the test's own loop, and connections to it."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gateway.simulator.config import SimulatorConfig
from gateway.simulator.simulator import Simulator
from tests.waiting import DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

ASKED = {"model": "sim/tiny", "prompt": [10, 11, 12], "max_tokens": 4, "logprobs": 0, "return_token_ids": True}
LOAD = "/v1/load_lora_adapter"
ADAPTER = {"lora_name": "a1", "lora_path": "/models/a1"}
DATA = Path(__file__).parents[1] / "data" / "vllm"


class Client:
    """One connection, and nothing that an HTTP library would do on its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, method: str, path: str, body: bytes = b"", request_id: str = "") -> None:
        head = f"{method} {path} HTTP/1.1\r\nhost: simulator\r\ncontent-length: {len(body)}\r\n"
        head += f"x-request-id: {request_id}\r\n" if request_id else ""
        self.writer.write(head.encode() + b"\r\n" + body)

    def ask(self, request_id: str = "", **changes: Any) -> None:
        self.send("POST", "/v1/completions", json.dumps({**ASKED, **changes}).encode(), request_id)

    async def reply(self) -> tuple[int, bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        status = int(head.split(" ", 2)[1])
        length = next(line for line in head.split("\r\n") if line.startswith("content-length: "))
        return status, await self.reader.readexactly(int(length.removeprefix("content-length: ")))

    async def call(self, method: str, path: str, document: Any = None) -> tuple[int, Any]:
        self.send(method, path, json.dumps(document).encode() if document is not None else b"")
        status, body = await self.reply()
        return status, json.loads(body) if body[:1] in (b"{", b"[") else body.decode()

    async def completion(self, request_id: str = "", **changes: Any) -> Any:
        self.ask(request_id, **changes)
        status, body = await self.reply()
        assert status == 200, body
        return json.loads(body)


class Bench:
    """A running simulator and connections to it, all closed at the end."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.address = simulator.url.removeprefix("http://").split(":")
        self._clients: list[Client] = []

    async def client(self, source_ip: str = "127.0.0.1") -> Client:
        host, port = self.address
        client = Client(*await asyncio.open_connection(host, int(port), local_addr=(source_ip, 0)))
        self._clients.append(client)
        return client

    async def until(self, what: str, look: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Until the simulator's own counts look so."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not look(stats := self.simulator.stats()):
            assert time.monotonic() < deadline_s, f"{what} did not happen: {stats}"
            await asyncio.sleep(0.005)
        return stats

    async def close(self) -> None:
        for client in self._clients:
            client.writer.close()
            await asyncio.gather(client.writer.wait_closed(), return_exceptions=True)


def configured(**settings: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bench", [settings], indirect=True, ids=[""])


@asynccontextmanager
async def running_bench(settings: dict[str, Any]) -> AsyncIterator[Bench]:
    async with Simulator(SimulatorConfig(**settings)) as simulator:
        bench = Bench(simulator)
        try:
            yield bench
        finally:
            await bench.close()
