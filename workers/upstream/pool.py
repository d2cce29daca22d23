"""The upstreams of this worker: choose one for a sample, learn what they serve, notice one that went away."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from shared.core.errors import BadRequest, NotFound, Overloaded
from shared.core.faults import BreakKind, Fault, FaultClass
from shared.core.model import Category
from shared.core.upstream_protocol import ProtocolChoice, UpstreamProtocol
from shared.log import Throttle
from shared.wire.vllm import beyond_completions
from workers.upstream.catalogue import AdapterBases, Served, decode_listing
from workers.upstream.protocols import Protocols
from workers.upstream.upstream import UpstreamLog, choose

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from shared.channel import UpstreamStatus
    from shared.clock import Clock
    from shared.core.model import ModelRef, SampleSpec
    from workers.upstream.catalogue import Catalogue, Target
    from workers.upstream.forwarder import Forwarder
    from workers.upstream.upstream import Upstream

log = logging.getLogger(__name__)

_LISTING_TIMEOUT_S: Final = 5.0
# The upstreams are asked again for a name that none serves, but not for each request of a confused client: requests
# wait for one another. No answer comes from memory: an adapter may have been loaded since, and a 404 ends a run.
_ASK_AGAIN_AFTER_S: Final = 2.0
_LOG_EVERY_S: Final = 30.0


class UpstreamPool:
    """The upstreams of one worker, and what is known of them."""

    def __init__(
        self,
        urls: Sequence[str],
        forwarder: Forwarder,
        catalogue: Catalogue,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        protocol: ProtocolChoice = ProtocolChoice.COMPLETIONS,
    ) -> None:
        self.protocols = Protocols(protocol, forwarder, clock)
        self._upstreams = [self.protocols.upstream(url) for url in urls]
        self._leaving: set[Upstream] = set()
        # Set when an exchange broke: the upstream may have moved, and the published list should be read.
        self.broken = asyncio.Event()
        self.changed = asyncio.Event()
        self._forwarder = forwarder
        self.catalogue = catalogue
        self._clock = clock
        self._sleep = sleep
        self._asking: asyncio.Task[None] | None = None
        self._asked_s = float("-inf")
        self._times_asked = 0
        self._log = UpstreamLog()
        self._wrong_replies = Throttle(_LOG_EVERY_S)
        self._served: dict[Upstream, list[Served]] = {}
        self._serving: dict[str, list[Upstream]] = {}
        # The upstreams for a base model; cleared when `_serving` changes.
        self._of_base: dict[str, Sequence[Upstream]] = {}
        self.bases = AdapterBases()

    def choose(
        self, model_name: str, avoid: Upstream | None = None, session_key: str = "", *, generates: bool = False
    ) -> Upstream:
        """Choose an upstream that lists `model_name` (an upstream's name); a 404 of another would end the client's run.

        Requests with one `session_key` go to one upstream as often as possible, for its prefix cache. With `generates`,
        choose one with /inference/v1/generate, if there is any.
        """
        if len(self._upstreams) == 1:
            return self._upstreams[0]
        serving = self._candidates(model_name)
        if generates:
            serving = [one for one in serving if one.protocol is UpstreamProtocol.GENERATE] or serving
        return choose(serving, self._clock.monotonic_s(), avoid, session_key)

    def require_protocol(self, spec: SampleSpec, model_name: str) -> None:
        """Raise `BadRequest` if no upstream with this model can execute the sample."""
        beyond = beyond_completions(spec)
        if beyond is None:
            return
        if not any(map(self.protocols.may_generate, self._candidates(model_name))):
            raise BadRequest(self.protocols.refusal(beyond))

    def _candidates(self, model_name: str) -> Sequence[Upstream]:
        known = self._of_base.get(model_name)
        if known is not None:
            return known
        serving = self._serving.get(model_name)
        if serving is None:
            return self._upstreams
        # If all that list an adapter have it for another base model, ask one that lacks it: it is then loaded there.
        lacking = [upstream for upstream in self._upstreams if upstream not in serving]
        found = self.bases.narrow(model_name, serving) or lacking or serving
        if not self.bases.narrows(model_name):
            self._of_base[model_name] = found
        return found

    def failed(self, upstream: Upstream, fault: Fault) -> None:
        """Note that an attempt failed there. A refusal of the client's own request does not count against it."""
        if fault.category is not Category.USER:
            upstream.faults += 1
        if fault.kind is FaultClass.WRONG_REPLY:
            not_logged = self._wrong_replies.allow(upstream.url, self._clock.monotonic_s())
            if not_logged is not None:
                fields = {"upstream": upstream.url, "error": fault.for_operators, "not_logged": not_logged}
                log.warning("upstream sent a wrong reply: the sample is executed again", extra=fields)
        if fault.upstream_down:
            self.broke(upstream, fault.for_operators)

    def broke(self, upstream: Upstream, why: str = "") -> None:
        """Note that an exchange found the upstream broken, and set `broken`: it may have moved."""
        self.protocols.doubt(upstream)
        upstream.failed(self._clock.monotonic_s(), why)
        self.broken.set()

    def completed(self, upstream: Upstream) -> None:
        upstream.succeeded(self._clock.monotonic_s())

    def up(self) -> list[Upstream]:
        """Return the upstreams that samples may go to now: those that are up, or all if none is."""
        now_s = self._clock.monotonic_s()
        return [upstream for upstream in self._upstreams if not upstream.is_down(now_s)] or list(self._upstreams)

    def has(self, model_name: str, upstream: Upstream) -> bool:
        """Return whether the upstream listed this model when it was last asked."""
        return upstream in self._serving.get(model_name, ())

    def is_listed(self, model_name: str, beside: Upstream) -> bool:
        """Return whether an upstream other than `beside` listed this model when it was last asked."""
        return any(upstream is not beside for upstream in self._serving.get(model_name, ()))

    def may_serve(self, model_name: str, upstream: Upstream) -> bool:
        """Return whether the upstream lists this model or has never listed any."""
        return upstream not in self._served or self.has(model_name, upstream)

    @property
    def bases_differ(self) -> bool:
        """Whether no base model is listed by all upstreams. Some list adapters without a parent."""
        bases = [{model.name for model in served if model.parent is None} for served in self._served.values()]
        return len(bases) > 1 and not set.intersection(*bases)

    def missing_models(self) -> tuple[str, ...]:
        """Return the values of `--model` that no upstream lists, or none while an upstream has not answered yet."""
        return self.catalogue.unlisted() if all(one in self._served for one in self._upstreams) else ()

    def forget(self, model_name: str, upstream: Upstream) -> None:
        """Note that the upstream has lost this model, whatever it listed."""
        if self.has(model_name, upstream):
            self._served[upstream] = [model for model in self._served[upstream] if model.name != model_name]
            self._take_over()

    def replace(self, urls: Sequence[str]) -> None:
        """Use these upstreams from now on, and set `changed` if they differ. Requests at the others run to their end.

        What the old ones served stays known until a new one has listed its models.
        """
        before = self._upstreams
        if [upstream.url for upstream in before] == list(urls):
            return
        known = {upstream.url: upstream for upstream in (*self._leaving, *before)}
        self._upstreams = [known.get(url) or self.protocols.upstream(url) for url in dict.fromkeys(urls)]
        self._leaving = {upstream for upstream in known.values() if upstream not in self._upstreams}
        self._served = {upstream: served for upstream, served in self._served.items() if upstream in self._upstreams}
        self._take_over()
        self.changed.set()

    @property
    def all_down(self) -> bool:
        now_s = self._clock.monotonic_s()
        return all(upstream.is_down(now_s) for upstream in self._upstreams)

    @property
    def some_down(self) -> bool:
        now_s = self._clock.monotonic_s()
        return any(upstream.is_down(now_s) for upstream in self._upstreams)

    def statuses(self) -> tuple[UpstreamStatus, ...]:
        now_s = self._clock.monotonic_s()
        self._leaving = {upstream for upstream in self._leaving if upstream.attempts}
        present = [upstream.status(now_s) for upstream in self._upstreams]
        return (*present, *(upstream.status(now_s, leaving=True) for upstream in self._leaving))

    async def resolve(self, model: ModelRef) -> Target:
        """Return where samples of this model go. Asks the upstreams again for a new name.

        Raises `NotFound`, or `Overloaded` while no upstream has ever listed its models.
        """
        try:
            return self.catalogue.resolve(model)
        except NotFound:
            await self.look_again()
        if not self.catalogue.known:
            raise Overloaded("upstream", "no upstream answers yet; try again later")
        return self.catalogue.resolve(model)

    async def learn_models(self) -> None:
        """Ask every upstream what it serves. The last list of one that does not answer stays."""
        self.changed.clear()
        self._asked_s = self._clock.monotonic_s()
        self._times_asked += 1
        await self.learn_from(*self._upstreams)

    async def learn_from(self, *upstreams: Upstream) -> None:
        """Ask these upstreams what they serve."""
        replies = await asyncio.gather(*map(self._listing, upstreams))
        for upstream, served in zip(upstreams, replies, strict=True):
            # It may have been taken off the list while it was asked.
            if served is not None and upstream in self._upstreams:
                self._served[upstream] = served
        self._take_over()

    async def look_again(self) -> None:
        """Ask every upstream, once for all concurrent callers, and at most every two seconds.

        The answers are younger than this call: the name that a caller looks for may be newer than the last ones.
        """
        before = self._times_asked
        while self._times_asked == before:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask_in_time())
            await asyncio.shield(self._asking)

    async def probe(self) -> None:
        """Find out whether upstreams that are down, or hold requests open, still accept connections."""
        now_s = self._clock.monotonic_s()
        doubtful = [upstream for upstream in (*self._upstreams, *self._leaving) if upstream.in_doubt(now_s)]
        await self.learn_from(*doubtful)
        now_s = self._clock.monotonic_s()
        for upstream in doubtful:
            if upstream.holds_open_while_refusing(now_s):
                fields = {"upstream": upstream.url, "in_flight": upstream.in_flight}
                log.warning("upstream refuses new connections: its open requests are executed elsewhere", extra=fields)
                for attempt in list(upstream.attempts):
                    attempt.break_off(BreakKind.DRAINING)
        self._log.look(self._upstreams, now_s)

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask_in_time(self) -> None:
        due_s = self._asked_s + _ASK_AGAIN_AFTER_S - self._clock.monotonic_s()
        if due_s > 0:
            await self._sleep(due_s)
        await self.learn_models()

    def _take_over(self) -> None:
        self._serving = {}
        for upstream, models in self._served.items():
            for name in {model.name for model in models}:
                self._serving.setdefault(name, []).append(upstream)
        self._of_base.clear()
        self.bases.learn(self._upstreams, self._served, self._serving)
        if self._served:
            self.catalogue.replace(model for served in self._served.values() for model in served)

    async def _listing(self, upstream: Upstream) -> list[Served] | None:
        reply = await self._forwarder.get(upstream, upstream.models_url, _LISTING_TIMEOUT_S)
        if isinstance(reply, Fault):
            if reply.upstream_down:
                self.broke(upstream, reply.for_operators)
            return None
        await self.protocols.learn(upstream)
        upstream.answered_probe(self._clock.monotonic_s())
        try:
            return decode_listing(reply)
        except ValueError as error:
            log.warning("upstream lists no models", extra={"upstream": upstream.url, "error": str(error)})
            return None
