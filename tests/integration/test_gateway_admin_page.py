"""The dashboard in a real browser, with a fixed status: what an operator should fix, and that everything fits."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec
import pytest

from gateway.admin.app import admin_app, admin_server
from gateway.admin.key_ledger import KeyView
from gateway.admin.report import RAW_LOGPROBS, warnings
from gateway.admin.timings import STAGES, Timings, UpstreamTotals
from shared.core.upstream_protocol import NO_GENERATE
from shared.store.contract import StoreInfo
from tests.browser import CHROMIUM, chromium
from tests.gateway_views import VIEW, histogram, slot_view, worker_status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from gateway.admin.view import View
    from tests.browser import Page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
]

FINE: Final = replace(VIEW, logprobs_scale={})
SHOWN: Final = "[...document.querySelectorAll('#warnings li')].map(each => each.textContent)"
HIDDEN: Final = "document.querySelector('#warned').hidden"
MARKUP: Final = "<img src=x onerror=document.title='taken'>&lt;b&gt;"


class FixedView:
    """In the supervisor's place: it tells whatever `now` is."""

    def __init__(self, now: View) -> None:
        self.now = now

    def view(self) -> View:
        return self.now


@asynccontextmanager
async def dashboard(controls: FixedView, directory: Path) -> AsyncIterator[Page]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = admin_server(admin_app(controls, None))  # type: ignore[arg-type] # the page only looks
        serving = asyncio.create_task(server.run_on(listener))
        try:
            async with chromium(directory) as page:
                await page.open(f"http://127.0.0.1:{listener.getsockname()[1]}/")
                await page.appears("document.querySelector('#board')?.hidden === false")
                yield page
        finally:
            server.stop()
            await serving


def lacking(model: str) -> View:
    status = msgspec.structs.replace(worker_status("up", "up"), missing_models=(model,))
    lacks_generate = msgspec.structs.replace(status.upstreams[1], lacks_generate=True)
    status = msgspec.structs.replace(status, upstreams=(status.upstreams[0], lacks_generate))
    return replace(FINE, slots=(slot_view(0, status),), logprobs_scale={"http://u0": False})


async def test_warnings_are_shown_and_gone_when_they_are_mended(tmp_path: Path) -> None:
    controls = FixedView(FINE)
    async with dashboard(controls, tmp_path) as page:
        assert await page.evaluate(HIDDEN)
        controls.now = lacking("mine=c")
        await page.appears(f"!{HIDDEN}")
        shown = await page.evaluate(SHOWN)
        assert shown[:2] == [f"http://u0: {RAW_LOGPROBS}", f"http://u1: {NO_GENERATE}"]
        assert shown[2].startswith("--model mine=c: no upstream lists it")
        controls.now = replace(lacking("mine=c"), logprobs_scale={})
        await page.appears(f"{SHOWN}.length === 2")
        assert await page.evaluate(SHOWN) == shown[1:]
        controls.now = FINE
        await page.appears(HIDDEN)
        assert await page.evaluate("document.querySelector('#health').textContent") == "ready"
        assert page.complaints == []


async def test_a_name_in_a_warning_is_no_markup_and_does_not_stick_out(tmp_path: Path) -> None:
    view = lacking(MARKUP + "x" * 2000)
    async with dashboard(FixedView(view), tmp_path) as page:
        assert await page.evaluate(SHOWN) == warnings(view)
        assert await page.evaluate("document.querySelectorAll('#warnings li *').length") == 0
        assert await page.evaluate("document.title") == "Sampling gateway"
        for width in (390, 1280):
            await page.resize(width, 844)
            await page.appears(f"document.documentElement.scrollWidth <= {width}")
        assert page.complaints == []


def crowded() -> View:
    """Long names and large numbers wherever there may be some."""
    status = worker_status("up", "resting", "unknown", "leaving")
    urls = (
        "https://vllm-0.sampling-upstreams.inference.svc.cluster.local:8443",
        f"https://{'a' * 120}:1",
        "http://u",
        "x",
    )
    upstreams = tuple(
        msgspec.structs.replace(upstream, url=url, in_flight=65_536)
        for upstream, url in zip(status.upstreams, urls, strict=True)
    )
    status = msgspec.structs.replace(status, upstreams=upstreams, in_flight=65_536, in_flight_bytes=2**36)
    slot = replace(slot_view(0, status), source_ip="fd00:1234:5678:9abc::1:2", pid=4_194_304)
    many = {url: UpstreamTotals(12_345_678, 123_456, 0, histogram(900.0), histogram(1500.0)) for url in urls}
    timings = Timings({stage: histogram(1500.0) for stage in STAGES}, many)
    return replace(
        VIEW,
        slots=(slot, replace(slot, slot=1)),
        logprobs_scale=dict.fromkeys(urls, False),
        redis=StoreInfo("sentinel", "Redis 8.2.1", 10 * 2**30, 64 * 2**30, "noeviction"),
        redis_url="rediss://redis-master.sampling.svc.cluster.local:6379/0",
        totals=dict.fromkeys(VIEW.totals, 123_456_789),
        since_start=timings,
        last_minute=timings,
        keys=tuple(KeyView(name, 65_536, 2**35, 987_654_321, 12_345_678) for name in ("a", "evaluations-" * 8)),
    )


STICKS_OUT: Final = """[...document.querySelectorAll("section, .tile")]
    .filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.textContent.trim().slice(0, 40))"""


async def test_long_names_and_large_numbers_do_not_stick_out_of_any_window(tmp_path: Path) -> None:
    """The widths stand on both sides of where the style sheet changes the page."""
    async with dashboard(FixedView(crowded()), tmp_path) as page:
        await page.appears("document.querySelectorAll('#upstreams tbody tr').length === 4")
        assert await page.evaluate("document.querySelectorAll('#keys tbody tr').length") == 2
        for width in (320, 390, 832, 840, 959, 961, 1280):
            await page.resize(width, 844)
            assert await page.evaluate("innerWidth") == width
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, width
            assert await page.evaluate(STICKS_OUT) == [], width


async def test_what_an_operator_copies_of_a_warning_stays_selected(tmp_path: Path) -> None:
    controls = FixedView(lacking("mine=c"))
    async with dashboard(controls, tmp_path) as page:
        await page.evaluate("getSelection().selectAllChildren(document.querySelector('#warnings li'))")
        # Drawn anew since: what else changed is shown.
        controls.now = replace(controls.now, version="9.9.9")
        await page.appears("document.querySelector('#identity').textContent.includes('9.9.9')")
        assert await page.evaluate("getSelection().toString()") == f"http://u0: {RAW_LOGPROBS}"


async def test_reasons_against_being_ready_stand_apart_from_warnings(tmp_path: Path) -> None:
    controls = FixedView(replace(lacking("mine=c"), redis=None))
    async with dashboard(controls, tmp_path) as page:
        reasons = "[...document.querySelectorAll('#reasons li')].map(each => each.textContent)"
        assert await page.evaluate(reasons) == ["Redis does not answer"]
        assert len(await page.evaluate(SHOWN)) == 3
        controls.now = FINE
        await page.appears("document.querySelector('#reasons').hidden")
