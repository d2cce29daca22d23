"""The dashboard of a real gateway under load, in a real browser: an operator sees which upstream is slow."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from gateway.settings.keys_file import new_entry
from shared.core.callers import NO_LIMITS
from tests.browser import APPEARS_S, CHROMIUM, chromium
from tests.system.stack import Gateway, Simulator

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.browser import Page

KEY: Final = "operators only"
SAMPLING_KEYS: Final = {"trainers": "tml-trainers", "evals": "tml-evals"}
FAST_S: Final = "0.2"
SLOW_S: Final = "2.0"
# Set to a directory: pictures of the page are kept there. docs/dashboard.png is one of them.
PICTURES: Final = os.environ.get("DASHBOARD_PICTURES")
# A picture is to show lines that have gone on for a while.
LOOKS: Final = 3 if PICTURES is None else 50
# Few enough that the upstreams' times are not the machine's.
CONCURRENCY: Final = {"trainers": 24, "evals": 8} if PICTURES is None else {"trainers": 120, "evals": 40}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
]


class Bench:
    """A gateway before a fast and a slow upstream."""

    def __init__(self, directory: Path) -> None:
        key_file = directory / "admin.key"
        key_file.write_text(KEY)
        self.simulators: list[Simulator] = []
        for name, seconds in (("fast", FAST_S), ("slow", SLOW_S)):
            (directory / name).mkdir()
            self.simulators.append(Simulator(directory / name, "--mode", "latency", "--gen-seconds", seconds))
        self.fast, self.slow = (simulator.url for simulator in self.simulators)
        keys_file = directory / "keys.toml"
        keys_file.write_text("".join(new_entry(name, key, NO_LIMITS) for name, key in SAMPLING_KEYS.items()))
        keys_file.chmod(0o600)
        flags = [
            "--upstream",
            self.slow,
            "--workers",
            "2",
            "--admin-key-file",
            str(key_file),
            "--api-keys-file",
            str(keys_file),
            "--redis-memory",
            "64MiB",
        ]
        self.gateway = Gateway(directory, self.fast, *flags)

    def close(self) -> None:
        self.gateway.close()
        for simulator in self.simulators:
            simulator.process.kill()

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Samples of several clients until the block is over."""
        running = [await self._client(name, key) for name, key in SAMPLING_KEYS.items()]
        try:
            yield
        finally:
            for process in running:
                process.terminate()
                await process.wait()

    async def _client(self, name: str, key: str) -> asyncio.subprocess.Process:
        arguments = ["--url", self.gateway.url, "--samples", "20000", "--concurrency", str(CONCURRENCY[name])]
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "bench", *arguments, "--api-key", key),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("dashboard"))
    yield made
    made.close()


@asynccontextmanager
async def dashboard(bench: Bench, directory: Path, key: str = KEY) -> AsyncIterator[Page]:
    """The page, after an operator has typed the key."""
    async with chromium(directory) as page:
        await page.open(bench.gateway.admin_url + "/")
        await page.appears("document.querySelector('#login') && !document.querySelector('#login').hidden")
        await page.evaluate(f"document.querySelector('#key').value = {key!r}")
        await page.evaluate("document.querySelector('#login button').click()")
        yield page


def row_of(url: str) -> str:
    """JavaScript: the cells of an upstream's row, by their titles."""
    return (
        "(() => { const row = [...document.querySelectorAll('#upstreams tbody tr')]"
        f".find(row => row.cells[0].textContent === '{url}');"
        " return row && Object.fromEntries([...row.cells].map(cell => [cell.dataset.label, cell.textContent])); })()"
    )


def tile(title: str) -> str:
    found = f"[...document.querySelectorAll('.tile')].find(tile => tile.querySelector('h3').textContent === '{title}')"
    return f"{found}.querySelector('.value').textContent"


async def keep_picture(page: Page, name: str) -> None:
    if PICTURES is not None:
        (Path(PICTURES) / f"{name}.png").write_bytes(await page.picture())


async def test_it_shows_which_upstream_is_slow(bench: Bench, tmp_path: Path) -> None:
    async with bench.load(), dashboard(bench, tmp_path) as page:
        await page.resize(1100, 900)
        slow = await page.appears(f"(row => row && row.State.includes('slow') && row)({row_of(bench.slow)})")
        fast = await page.evaluate(row_of(bench.fast))
        assert "slow" not in fast["State"]
        assert fast["State"].startswith("up")
        assert slow["p50"].endswith(" s")
        assert fast["p50"].endswith(" ms")
        await page.appears(f"parseFloat({tile('Throughput')}) > 0")
        await page.appears(f"parseFloat({tile('In flight')}) > 0")
        points = "document.querySelector('.spark-line').getAttribute('points').split(' ').length"
        await page.appears(f"{points} >= {LOOKS}", within_s=APPEARS_S + 2 * LOOKS)
        assert await page.evaluate("document.querySelectorAll('#workers tbody tr').length") == 2
        assert await page.evaluate("document.querySelectorAll('#stages tbody tr').length") == 5
        of_keys = "[...document.querySelectorAll('#keys tbody tr')]"
        for number, name in enumerate(SAMPLING_KEYS):
            await page.appears(f"{of_keys}[{number}].cells[0].textContent === '{name}'")
            await page.appears(f"parseInt({of_keys}[{number}].cells[3].textContent) > 0")
        assert await page.evaluate("document.querySelector('#health').textContent") == "ready"
        await keep_picture(page, "dashboard")
        await page.resize(1100, 900, dark=True)
        await keep_picture(page, "dashboard-dark")
        await page.resize(390, 844)
        await page.appears("document.documentElement.scrollWidth <= 390")
        await keep_picture(page, "dashboard-phone")
        assert page.complaints == [each for each in page.complaints if "401" in each]


async def test_dark_mode_is_dark(bench: Bench, tmp_path: Path) -> None:
    async with dashboard(bench, tmp_path) as page:
        grounds = []
        for dark in (False, True):
            await page.resize(1280, 900, dark=dark)
            colour = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            grounds.append(sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))))
        light, dark_ground = grounds
        assert light > 600
        assert dark_ground < 150


async def test_a_wrong_key_is_told_and_asked_for_again(bench: Bench, tmp_path: Path) -> None:
    async with dashboard(bench, tmp_path, key="a guess") as page:
        await page.appears("document.querySelector('#login-error').textContent.includes('not the admin key')")
        assert await page.evaluate("document.querySelector('#board').hidden")
        assert await page.evaluate("sessionStorage.length") == 0


async def test_an_upstream_that_is_down_and_a_gateway_that_is_gone(tmp_path: Path) -> None:
    """What an operator looks at when something is wrong must say so, not stand still."""
    bench = Bench(tmp_path)
    try:
        async with dashboard(bench, tmp_path) as page:
            async with bench.load():
                await page.appears(f"({row_of(bench.slow)} || {{}}).State?.startsWith('up')")
                bench.simulators[1].process.kill()
                await page.appears(f"({row_of(bench.slow)} || {{}}).State?.startsWith('resting')")
            bench.gateway.close()
            await page.appears("document.querySelector('#health').textContent === 'the gateway does not answer'")
            assert await page.evaluate("document.querySelector('#board').classList.contains('stale')")
    finally:
        bench.close()
