"""Adapters where samples need them.

Two ways. With `--lora-path` the gateway loads an adapter into every upstream that would be asked for it, when it is
first sampled, and again into one that lost it (a restart). Without, somebody else loads it, and samples wait for it.
Either way a sample goes only to an upstream that lists its adapter.

An adapter belongs to one base model. Which, an upstream tells that has the adapter, or whoever binds it; as soon as
that is known, only upstreams that serve the base model are asked to load it (`adapter_bases.py`). Until then all are,
one after the other where they serve different models, and refusals of some of them are nobody's trouble.

What is loading is shared: however many samples wait, there is one task per adapter and upstream here, and one worker at
a time that asks (`adapter_loading.py`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shared.core.errors import BadRequest, NotFound, Overloaded
from shared.core.faults import Fault, FaultClass
from shared.core.model import Category

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from shared.clock import Clock
    from shared.core.adapters import Adapter
    from shared.core.model import ModelRef
    from workers.upstream.adapter_loading import AdapterLoader
    from workers.upstream.catalogue import Target
    from workers.upstream.pool import UpstreamPool
    from workers.upstream.upstream import Upstream

    AdapterAt = tuple[str, Upstream]

log = logging.getLogger(__name__)

# What an upstream has just refused it would refuse again; but files may become visible late on a network file system.
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 10.0
# A refusal is remembered for its pause; a client that makes names up must not fill the memory with them.
_REFUSALS_MAX: Final = 10_000
# How long binding an adapter waits for files that are not there yet, and for all of it: below the SDK's 60 s.
_BIND_RETRIES_S: Final = 5.0
_BIND_WAIT_S: Final = 45.0
# Once one upstream has it, how long binding waits for the others: the first wave of samples should meet them all.
_OTHERS_WAIT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class _Refusal:
    fault: Fault
    times: int
    until_s: float


class Adapters:
    def __init__(
        self,
        pool: UpstreamPool,
        loader: AdapterLoader,
        clock: Clock,
        wait_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`wait_s`: `--lora-wait`."""
        self._pool = pool
        self._loader = loader
        self._clock = clock
        self._wait_s = wait_s
        self._sleep = sleep
        self._loading: dict[AdapterAt, asyncio.Task[None]] = {}
        self._refusals: dict[AdapterAt, _Refusal] = {}
        self._lost: set[AdapterAt] = set()

    # -- for the routes

    async def bind(self, model: ModelRef, base_model: str | None = None) -> Target:
        """What a new sampling session samples from; an adapter is loaded now. `base_model`: of an adapter, where known.

        Raises `NotFound` for an unknown model, run or checkpoint, `BadRequest` for an adapter that cannot be loaded,
        `Overloaded` while no upstream can be asked.
        """
        if model.model_path is not None:
            adapter = self._pool.catalogue.adapter(model.model_path)
            if base_model is not None:
                self._pool.bases.tell(adapter.name, self._pool.catalogue.upstream_name(base_model))
            if adapter.directory is not None:
                await self._bring_in_time(adapter)
        return self._of_its_base(await self._pool.resolve(model))

    async def target(self, model: ModelRef) -> Target:
        """Where samples of a session that was bound before go. Its adapter may be gone: its samples wait for it.

        Raises as `UpstreamPool.resolve` does for base models.
        """
        if model.model_path is None:
            return await self._pool.resolve(model)
        catalogue = self._pool.catalogue
        try:
            target = catalogue.resolve(model)
        except NotFound:
            target = catalogue.awaited(catalogue.adapter(model.model_path))
        return self._of_its_base(target)

    def _of_its_base(self, target: Target) -> Target:
        base = self._pool.bases.of(target.adapter.name) if target.adapter is not None else None
        return self._pool.catalogue.of_base(target, base) if base is not None else target

    async def _bring_in_time(self, adapter: Adapter) -> None:
        try:
            async with asyncio.timeout(_BIND_WAIT_S):
                await self._bring(adapter)
        except TimeoutError:
            raise Overloaded("upstream", f"{adapter.path} is still being loaded; try again") from None

    async def _bring(self, adapter: Adapter) -> None:
        until_s = self._clock.monotonic_s() + _BIND_RETRIES_S
        while (fault := await self.place(adapter)) is not None:
            if fault.wait_s is None:
                raise Overloaded("upstream", f"{fault.message}; try again later")
            if self._clock.monotonic_s() >= until_s:
                raise _refusal(adapter, fault)
            await self._sleep(_FIRST_PAUSE_S)
        if others := self._loads(adapter):
            await asyncio.wait(others, timeout=_OTHERS_WAIT_S)

    # -- for the samples

    def ready(self, adapter: Adapter) -> bool:
        """Whether an upstream that is awake has it. Where others lack it, loading begins in passing."""
        fitting = [upstream for upstream in self._pool.awake() if self._fits(adapter, upstream)]
        missing = [upstream for upstream in fitting if not self._pool.has(adapter.name, upstream)]
        if missing and adapter.directory is not None:
            for upstream in self._to_ask(adapter, missing):
                self._begin(adapter, upstream)
        return len(missing) < len(fitting)

    async def place(self, adapter: Adapter) -> Fault | None:
        """Return when an upstream that is awake has it, or with why none has."""
        if adapter.directory is None:
            return await self._wait_for_somebody(adapter)
        while not self.ready(adapter):
            loads = self._loads(adapter)
            if not loads:
                return self._why_not(adapter)
            await asyncio.wait(loads, return_when=asyncio.FIRST_COMPLETED)
        return None

    def lost(self, adapter: Adapter, upstream: Upstream, fault: Fault) -> Fault:
        """This upstream refused a sample since it has no such model: what to make of that fault."""
        self._pool.forget(adapter.name, upstream)
        self._lost.add((adapter.name, upstream))
        return Fault(FaultClass.NEVER_EXECUTED, fault.message, Category.SERVER, wait_s=self._wait_s)

    async def close(self) -> None:
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_for_somebody(self, adapter: Adapter) -> Fault | None:
        """It is loaded by whoever loads adapters here: the upstreams are asked until it is there."""
        if self.ready(adapter):
            return None
        await self._pool.look_again()
        return None if self.ready(adapter) else self._missing(adapter)

    def _missing(self, adapter: Adapter) -> Fault:
        # One that rests may have it: that is worth the wait for any upstream.
        wait_s = None if self._pool.some_rest else self._wait_s
        message = f"no upstream serves {adapter.path} (as model {adapter.name!r})"
        return Fault(FaultClass.NEVER_EXECUTED, message, Category.SERVER, wait_s=wait_s)

    # -- base models

    def _fits(self, adapter: Adapter, upstream: Upstream) -> bool:
        """Whether it has the adapter, or may be asked for it: it serves its base model, or one of them is unknown."""
        if self._pool.has(adapter.name, upstream):
            return self._pool.bases.are_met(adapter.name, upstream)
        base = self._pool.bases.of(adapter.name)
        return base is None or self._pool.may_serve(base, upstream)

    def _is_open(self, adapter: Adapter) -> bool:
        """Whether nobody knows which of several base models it belongs to."""
        return self._pool.bases.of(adapter.name) is None and self._pool.bases_differ

    def _to_ask(self, adapter: Adapter, missing: list[Upstream]) -> list[Upstream]:
        """One after the other, as long as any may be wrong: whoever takes it first decides."""
        if not self._is_open(adapter):
            return missing
        if any(name == adapter.name for name, _ in self._loading):
            return []
        chosen = min(missing, key=lambda upstream: self._times_refused(adapter, upstream))
        # Once all have refused it they rest together: the pause of the first may be over before the last was asked, and
        # whoever waits for the last would wait for ever.
        is_new = self._times_refused(adapter, chosen) == 0
        return [chosen] if is_new or all(self._may_begin(adapter, upstream) for upstream in missing) else []

    def _times_refused(self, adapter: Adapter, upstream: Upstream) -> int:
        refusal = self._refusals.get((adapter.name, upstream))
        return refusal.times if refusal is not None else 0

    async def _still_fits(self, adapter: Adapter, upstream: Upstream) -> bool:
        """The same, of an adapter that another worker may have loaded meanwhile, and so found out where it belongs."""
        if self._is_open(adapter):
            await self._pool.look_again()
            if self._is_open(adapter):
                return not self._pool.is_listed(adapter.name, beside=upstream)
        return self._fits(adapter, upstream)

    # -- loading

    def _may_begin(self, adapter: Adapter, upstream: Upstream) -> bool:
        refusal = self._refusals.get((adapter.name, upstream))
        paused = refusal is not None and self._clock.monotonic_s() < refusal.until_s
        return (adapter.name, upstream) not in self._loading and not paused

    def _begin(self, adapter: Adapter, upstream: Upstream) -> None:
        if self._may_begin(adapter, upstream):
            self._loading[adapter.name, upstream] = asyncio.create_task(self._load(adapter, upstream))

    async def _load(self, adapter: Adapter, upstream: Upstream) -> None:
        place = (adapter.name, upstream)
        try:
            if await self._still_fits(adapter, upstream):
                fault = await self._loader.load(adapter, upstream, listed_in_vain=place in self._lost)
            else:
                fault = self._missing(adapter)
        except Exception:
            # A task boundary: who waits for it is owed a reason.
            log.exception("loading broke", extra={"adapter": adapter.name, "upstream": upstream.url})
            fault = self._missing(adapter)
        finally:
            del self._loading[place]
        self._lost.discard(place)
        self._note(place, fault)

    def _note(self, place: AdapterAt, fault: Fault | None) -> None:
        before = self._refusals.pop(place, None)
        if fault is None:
            return
        times = before.times + 1 if before is not None else 1
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(times - 1, 10), _LONGEST_PAUSE_S)
        self._refusals[place] = _Refusal(fault, times, self._clock.monotonic_s() + pause_s)
        if len(self._refusals) > _REFUSALS_MAX:
            del self._refusals[next(iter(self._refusals))]

    def _loads(self, adapter: Adapter) -> list[asyncio.Task[None]]:
        places = ((adapter.name, upstream) for upstream in self._pool.awake())
        return [self._loading[place] for place in places if place in self._loading]

    def _why_not(self, adapter: Adapter) -> Fault:
        """Of several reasons the one that is worth the longest wait."""
        places = ((adapter.name, upstream) for upstream in self._pool.awake())
        faults = [self._refusals[place].fault for place in places if place in self._refusals]
        return max(faults, key=_worth_s, default=self._missing(adapter))


def _worth_s(fault: Fault) -> float:
    return fault.wait_s if fault.wait_s is not None else float("inf")


def _refusal(adapter: Adapter, fault: Fault) -> NotFound | BadRequest:
    if fault.category is Category.USER:
        return NotFound(f"there is no {adapter.path!r}: {fault.message}")
    return BadRequest(fault.message)
