"""The upstreams of this worker, and the two things done about them in the background: learning what they serve, and
noticing one that has gone away without saying so.
"""

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
from workers.upstream import upstream as rules
from workers.upstream.catalogue import AdapterBases, Served, decode_listing
from workers.upstream.news import UpstreamNews
from workers.upstream.protocols import Protocols

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from shared.channel import UpstreamStatus
    from shared.clock import Clock
    from shared.core.model import ModelRef, SampleSpec
    from workers.upstream.catalogue import Catalogue, Target
    from workers.upstream.forwarder import Forwarder
    from workers.upstream.upstream import Upstream

log = logging.getLogger(__name__)

_LISTING_TIMEOUT_S: Final = 5.0
# A name that nobody serves makes the upstreams be asked again, but not by every request of a confused client: they wait
# for each other. Waiting, not an answer from memory: an adapter may have been loaded since, and a 404 ends a run.
_ASK_AGAIN_AFTER_S: Final = 2.0
_LOG_EVERY_S: Final = 30.0


class UpstreamPool:
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
        self._news = UpstreamNews()
        self._wrong_replies = Throttle(_LOG_EVERY_S)
        self._served: dict[Upstream, list[Served]] = {}
        self._serving: dict[str, list[Upstream]] = {}
        # Whom samples of a base model may go to, which changes when `_serving` does.
        self._of_base: dict[str, Sequence[Upstream]] = {}
        self.bases = AdapterBases()

    def choose(
        self, model_name: str, avoid: Upstream | None = None, session_key: str = "", *, generates: bool = False
    ) -> Upstream:
        """Among those that list `model_name` (an upstream's name): another's 404 would end the client's run.

        `session_key`: what should meet one upstream as often as possible, for its prefix cache. `generates`: it is for
        one with /inference/v1/generate, if there is any.
        """
        if len(self._upstreams) == 1:
            return self._upstreams[0]
        serving = self._candidates(model_name)
        if generates:
            serving = [one for one in serving if one.protocol is UpstreamProtocol.GENERATE] or serving
        return rules.choose(serving, self._clock.monotonic_s(), avoid, session_key)

    def require_protocol(self, spec: SampleSpec, model_name: str) -> None:
        """Raises `BadRequest` for what no upstream with this model can be asked."""
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
        # Where all that list it have it of another base model: who does not have it says so, and it is loaded there.
        lacking = [upstream for upstream in self._upstreams if upstream not in serving]
        found = self.bases.narrow(model_name, serving) or lacking or serving
        if not self.bases.narrows(model_name):
            self._of_base[model_name] = found
        return found

    def failed(self, upstream: Upstream, fault: Fault) -> None:
        """An attempt there failed. What the client's own request was refused for is not the upstream's failure."""
        if fault.category is not Category.USER:
            upstream.faults += 1
        if fault.kind is FaultClass.WRONG_REPLY:
            self._log_wrong_reply(upstream, fault)
        if fault.upstream_down:
            self.broke(upstream, fault.message)

    def _log_wrong_reply(self, upstream: Upstream, fault: Fault) -> None:
        held_back = self._wrong_replies.allow(upstream.url, self._clock.monotonic_s())
        if held_back is not None:
            fields = {"upstream": upstream.url, "error": fault.message, "not_logged": held_back}
            log.warning("upstream sent a wrong reply: the sample is executed again", extra=fields)

    def broke(self, upstream: Upstream, why: str = "") -> None:
        """Note that an exchange with this upstream broke, and set `broken`."""
        self.protocols.doubt(upstream)
        upstream.failed(self._clock.monotonic_s(), why)
        self.broken.set()

    def completed(self, upstream: Upstream) -> None:
        upstream.succeeded(self._clock.monotonic_s())

    def awake(self) -> list[Upstream]:
        """Those that samples may go to now; all, where none is awake."""
        now_s = self._clock.monotonic_s()
        return [upstream for upstream in self._upstreams if not upstream.rests(now_s)] or list(self._upstreams)

    def has(self, model_name: str, upstream: Upstream) -> bool:
        """Whether it listed this model when it was asked last."""
        return upstream in self._serving.get(model_name, ())

    def is_listed(self, model_name: str, beside: Upstream) -> bool:
        """Whether an upstream other than `beside` listed this model when it was asked last."""
        return any(upstream is not beside for upstream in self._serving.get(model_name, ()))

    def may_serve(self, model_name: str, upstream: Upstream) -> bool:
        """Whether it lists this model, or has never told what it serves."""
        return upstream not in self._served or self.has(model_name, upstream)

    @property
    def bases_differ(self) -> bool:
        """Whether there is no base model that all of the upstreams list. Some list adapters without a parent."""
        bases = [{model.name for model in told if model.parent is None} for told in self._served.values()]
        return len(bases) > 1 and not set.intersection(*bases)

    def missing_models(self) -> tuple[str, ...]:
        """Those of `--model` that no upstream lists; none while one has not told yet: it may be theirs."""
        return self.catalogue.unlisted() if all(one in self._served for one in self._upstreams) else ()

    def forget(self, model_name: str, upstream: Upstream) -> None:
        """It does not have this model any more, whatever it listed."""
        if self.has(model_name, upstream):
            self._served[upstream] = [model for model in self._served[upstream] if model.name != model_name]
            self._take_over()

    def replace(self, urls: Sequence[str]) -> None:
        """Ask these from now on; what runs at others runs to its end. `changed` is set when something is new.

        What the old ones served stays known until a new one has told what it serves.
        """
        before = self._upstreams
        if [upstream.url for upstream in before] == list(urls):
            return
        known = {upstream.url: upstream for upstream in (*self._leaving, *before)}
        self._upstreams = [known.get(url) or self.protocols.upstream(url) for url in dict.fromkeys(urls)]
        self._leaving = {upstream for upstream in known.values() if upstream not in self._upstreams}
        self._served = {upstream: told for upstream, told in self._served.items() if upstream in self._upstreams}
        self._take_over()
        self.changed.set()

    @property
    def all_rest(self) -> bool:
        return rules.all_rest(self._upstreams, self._clock.monotonic_s())

    @property
    def some_rest(self) -> bool:
        now_s = self._clock.monotonic_s()
        return any(upstream.rests(now_s) for upstream in self._upstreams)

    def statuses(self) -> tuple[UpstreamStatus, ...]:
        now_s = self._clock.monotonic_s()
        self._leaving = {upstream for upstream in self._leaving if upstream.attempts}
        present = [upstream.status(now_s) for upstream in self._upstreams]
        return (*present, *(upstream.status(now_s, leaving=True) for upstream in self._leaving))

    async def resolve(self, model: ModelRef) -> Target:
        """Where samples of this model go; asks the upstreams again when the name is new.

        Raises `NotFound`, or `Overloaded` while no upstream has ever told what it serves.
        """
        try:
            return self.catalogue.resolve(model)
        except NotFound:
            await self._ask_again()
        if not self.catalogue.known:
            raise Overloaded("upstream", "no upstream answers yet; try again later")
        return self.catalogue.resolve(model)

    async def learn_models(self) -> None:
        """Ask every upstream what it serves; one that does not answer keeps what it told before."""
        self.changed.clear()
        self._asked_s = self._clock.monotonic_s()
        self._times_asked += 1
        await self._learn_from(self._upstreams)

    async def learn_from(self, upstream: Upstream) -> None:
        """Ask one upstream what it serves."""
        await self._learn_from([upstream])

    async def look_again(self) -> None:
        """Ask every upstream, once for all who want it at the same time, and not oftener than every two seconds."""
        await self._ask_again()

    async def probe(self) -> None:
        """Find out whether upstreams that rest, or hold requests open, still take connections."""
        now_s = self._clock.monotonic_s()
        doubtful = [upstream for upstream in (*self._upstreams, *self._leaving) if upstream.in_doubt(now_s)]
        await self._learn_from(doubtful)
        now_s = self._clock.monotonic_s()
        for upstream in doubtful:
            if upstream.holds_open_while_refusing(now_s):
                self._break_off(upstream)
        self._news.look(self._upstreams, now_s)

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask_again(self) -> None:
        """Ask once for all who wait. What was asked before does not count: the name may be younger."""
        before = self._times_asked
        while self._times_asked == before:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask_in_time())
            await asyncio.shield(self._asking)

    async def _ask_in_time(self) -> None:
        due_s = self._asked_s + _ASK_AGAIN_AFTER_S - self._clock.monotonic_s()
        if due_s > 0:
            await self._sleep(due_s)
        await self.learn_models()

    async def _learn_from(self, upstreams: Sequence[Upstream]) -> None:
        replies = await asyncio.gather(*(self._listing(upstream) for upstream in upstreams))
        for upstream, served in zip(upstreams, replies, strict=True):
            # It may have been taken off the list while it was asked.
            if served is not None and upstream in self._upstreams:
                self._served[upstream] = served
        self._take_over()

    def _take_over(self) -> None:
        self._serving = _by_name(self._served)
        self._of_base.clear()
        self.bases.learn(self._upstreams, self._served, self._serving)
        if self._served:
            self.catalogue.replace(model for served in self._served.values() for model in served)

    async def _listing(self, upstream: Upstream) -> list[Served] | None:
        reply = await self._forwarder.get(upstream, upstream.models_url, _LISTING_TIMEOUT_S)
        if isinstance(reply, Fault):
            if reply.upstream_down:
                self.broke(upstream, reply.message)
            return None
        await self.protocols.learn(upstream)
        upstream.answered_probe(self._clock.monotonic_s())
        try:
            return decode_listing(reply)
        except ValueError as error:
            log.warning("upstream tells no models", extra={"upstream": upstream.url, "error": str(error)})
            return None

    def _break_off(self, upstream: Upstream) -> None:
        open_attempts = list(upstream.attempts)
        log.warning(
            "upstream refuses new connections: its open requests are executed elsewhere",
            extra={"upstream": upstream.url, "in_flight": len(open_attempts)},
        )
        for attempt in open_attempts:
            attempt.break_off(BreakKind.DRAINING)


def _by_name(served: Mapping[Upstream, Iterable[Served]]) -> dict[str, list[Upstream]]:
    serving: dict[str, list[Upstream]] = {}
    for upstream, models in served.items():
        for name in {model.name for model in models}:
            serving.setdefault(name, []).append(upstream)
    return serving
