"""A headless chromium over its own protocol: one page, what it shows, and pictures of it."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_START_S: Final = 60.0
APPEARS_S: Final = 60.0
_LOOK_S: Final = 0.05
_LARGEST_MESSAGE_BYTES: Final = 32 * 1024 * 1024


class Page:
    """`complaints`: what the page wrote to its console as an error, and what it threw."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)

    async def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = json.loads(await self._socket.receive_str())
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(message["params"]["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.complaints.append(message["params"]["entry"]["text"])

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.command(f"{domain}.enable")
        await self.command("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        told = await self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def appears(self, expression: str, within_s: float = APPEARS_S) -> Any:
        """Wait until it is true."""
        value = None
        try:
            async with asyncio.timeout(within_s):
                while True:
                    if value := await self.evaluate(expression):
                        return value
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            shown = await self.evaluate("document.body.innerText")
            raise AssertionError(f"never: {expression}; last {value!r}; the page shows:\n{shown}") from None

    async def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.command("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self) -> bytes:
        """PNG of the whole page."""
        told = await self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(told["data"])


@asynccontextmanager
async def chromium(directory: Path) -> AsyncIterator[Page]:
    assert CHROMIUM is not None
    profile = directory / "profile"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    # A picture of the whole page has no room for one: its right edge would be cut off.
    options.append("--hide-scrollbars")
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *options,
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{await _port(profile)}/json/list") as reply:
                target = next(each for each in await reply.json() if each["type"] == "page")
            address = target["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=_LARGEST_MESSAGE_BYTES) as socket:
                yield Page(socket)
    finally:
        process.terminate()
        await process.wait()


async def _port(profile: Path) -> int:
    """Chromium writes it there when it listens."""
    told = profile / "DevToolsActivePort"
    async with asyncio.timeout(_START_S):
        while True:
            if told.exists() and "\n" in (text := told.read_text()):
                return int(text.splitlines()[0])
            await asyncio.sleep(_LOOK_S)
