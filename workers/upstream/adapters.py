"""Keep adapters loaded where samples need them.

With `--lora-path` the gateway loads an adapter into every upstream that would be asked for it, when it is first
sampled, and again into an upstream that lost it in a restart. Without the flag the operator loads it, and samples wait
for that. Either way a sample goes only to an upstream that lists its adapter.

An adapter belongs to one base model (`catalogue.AdapterBases`). Once the base model is known, only upstreams that serve
it are asked to load the adapter. Until then all are asked, one after the other if they serve different models, and it
does not matter that some refuse.

However many samples wait, there is one task per adapter and upstream here, and one worker at a time that asks
(`adapter_loading.py`).
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

# An upstream would refuse again at once; but files may become visible late on a network file system.
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 10.0
# A client that makes up names must not fill the memory with refusals.
_REFUSALS_MAX: Final = 10_000
# How long binding an adapter waits for missing files, and how long in total: below the SDK's 60 s.
_BIND_RETRIES_S: Final = 5.0
_BIND_WAIT_S: Final = 45.0
# How long binding waits for the other upstreams once one has the adapter, so that the first wave of samples finds all.
_OTHERS_WAIT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class _Refusal:
    fault: Fault
    times: int
    until_s: float


class Adapters:
    """Where each adapter is loaded, is being loaded, or was refused."""

    def __init__(
        self,
        pool: UpstreamPool,
        loader: AdapterLoader,
        clock: Clock,
        wait_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Let samples wait for their adapter for `wait_s` (`--lora-wait`)."""
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
        """Return what a new sampling session samples from. Loads an adapter, whose `base_model` may be given.

        Raises `NotFound` for an unknown model, run or checkpoint, `BadRequest` for an adapter that cannot be loaded,
        and `Overloaded` while no upstream can be asked.
        """
        if model.model_path is not None:
            adapter = self._pool.catalogue.adapter(model.model_path)
            if base_model is not None:
                self._pool.bases.report(adapter.name, self._pool.catalogue.upstream_name(base_model))
            if adapter.directory is not None:
                try:
                    async with asyncio.timeout(_BIND_WAIT_S):
                        await self._bring(adapter)
                except TimeoutError:
                    raise Overloaded("upstream", f"{adapter.path} is still being loaded; try again") from None
        return self._of_its_base(await self._pool.resolve(model))

    async def target(self, model: ModelRef) -> Target:
        """Return where samples of an existing session go. If its adapter is gone, they wait for it.

        For a base model, raises as `UpstreamPool.resolve` does.
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
        """Return whether an upstream that is up has the adapter. Starts loading it into those that lack it."""
        fitting = [upstream for upstream in self._pool.up() if self._fits(adapter, upstream)]
        missing = [upstream for upstream in fitting if not self._pool.has(adapter.name, upstream)]
        if missing and adapter.directory is not None:
            for upstream in self._to_ask(adapter, missing):
                self._begin(adapter, upstream)
        return len(missing) < len(fitting)

    async def place(self, adapter: Adapter) -> Fault | None:
        """Wait until an upstream that is up has the adapter; return why none has it, or None."""
        if adapter.directory is None:
            # Adapters are not loaded from here. Look once more whether one was.
            if not self.ready(adapter):
                await self._pool.look_again()
            return None if self.ready(adapter) else self._missing(adapter)
        while not self.ready(adapter):
            loads = self._loads(adapter)
            if not loads:
                return self._why_not(adapter)
            await asyncio.wait(loads, return_when=asyncio.FIRST_COMPLETED)
        return None

    def lost(self, adapter: Adapter, upstream: Upstream, fault: Fault) -> Fault:
        """Note that an upstream refused a sample because it lacks the adapter; return the fault for the sample."""
        self._pool.forget(adapter.name, upstream)
        self._lost.add((adapter.name, upstream))
        return Fault(FaultClass.NEVER_EXECUTED, fault.message, Category.SERVER, wait_s=self._wait_s)

    async def close(self) -> None:
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _missing(self, adapter: Adapter) -> Fault:
        # An upstream that is down may have it, which is worth the wait for any upstream.
        wait_s = None if self._pool.some_down else self._wait_s
        message = f"no upstream serves {adapter.path} (as model {adapter.name!r})"
        return Fault(FaultClass.NEVER_EXECUTED, message, Category.SERVER, wait_s=wait_s)

    # -- base models

    def _fits(self, adapter: Adapter, upstream: Upstream) -> bool:
        """Return whether the upstream has the adapter or may be asked to load it, as far as base models are known."""
        if self._pool.has(adapter.name, upstream):
            return self._pool.bases.are_right(adapter.name, upstream)
        base = self._pool.bases.of(adapter.name)
        return base is None or self._pool.may_serve(base, upstream)

    def _has_unknown_base(self, adapter: Adapter) -> bool:
        """Return whether the adapter may belong to any of several base models."""
        return self._pool.bases.of(adapter.name) is None and self._pool.bases_differ

    def _to_ask(self, adapter: Adapter, missing: list[Upstream]) -> list[Upstream]:
        """Return which upstreams to ask to load an adapter: one at a time while its base is unknown, else all."""
        if not self._has_unknown_base(adapter):
            return missing
        if any(name == adapter.name for name, _ in self._loading):
            return []
        chosen = min(missing, key=lambda upstream: self._times_refused(adapter, upstream))
        # Once all have refused it, they pause together. Otherwise the pause of the first would end before the last was
        # asked, and a sample that waits for the last would wait forever.
        is_new = self._times_refused(adapter, chosen) == 0
        return [chosen] if is_new or all(self._may_begin(adapter, upstream) for upstream in missing) else []

    def _times_refused(self, adapter: Adapter, upstream: Upstream) -> int:
        refusal = self._refusals.get((adapter.name, upstream))
        return refusal.times if refusal is not None else 0

    async def _still_fits(self, adapter: Adapter, upstream: Upstream) -> bool:
        """Check `_fits` again: another worker may have loaded the adapter, and so found out its base model."""
        if self._has_unknown_base(adapter):
            await self._pool.look_again()
            if self._has_unknown_base(adapter):
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
            # A task boundary: the samples that wait for it need a reason.
            log.exception("loading an adapter failed", extra={"adapter": adapter.name, "upstream": upstream.url})
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
        places = ((adapter.name, upstream) for upstream in self._pool.up())
        return [self._loading[place] for place in places if place in self._loading]

    def _why_not(self, adapter: Adapter) -> Fault:
        """Return the reason that is worth the longest wait."""
        places = ((adapter.name, upstream) for upstream in self._pool.up())
        faults = [self._refusals[place].fault for place in places if place in self._refusals]
        no_limit = float("inf")
        return max(
            faults,
            key=lambda fault: fault.wait_s if fault.wait_s is not None else no_limit,
            default=self._missing(adapter),
        )


def _refusal(adapter: Adapter, fault: Fault) -> NotFound | BadRequest:
    if fault.category is Category.USER:
        return NotFound(f"there is no {adapter.path!r}: {fault.message}")
    return BadRequest(fault.message)
