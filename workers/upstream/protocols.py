"""Which API each upstream is asked by (`--upstream-protocol`).

With `auto`, an upstream that answers is asked once whether it has /inference/v1/generate. The answer holds until the
upstream breaks, since another vLLM may come back, or until a sample finds that the endpoint is missing. Until the first
answer samples go to /v1/completions, which every vLLM has.

With `generate`, an upstream where a sample finds the endpoint missing is logged, says so in its status, and is asked
again each time that it is asked for its models.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shared.core.faults import Fault, FaultClass
from shared.core.logprobs_check import PROBE_REQUEST_ID
from shared.core.model import Category
from shared.core.upstream_protocol import NO_GENERATE, PROBE_BODY, ProtocolChoice, UpstreamProtocol, has_generate
from shared.log import Throttle
from workers.upstream.upstream import Upstream

if TYPE_CHECKING:
    from shared.clock import Clock
    from workers.upstream.forwarder import Forwarder

log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 5.0
_LOG_EVERY_S: Final = 30.0
_REMEDIES: Final = {
    ProtocolChoice.COMPLETIONS: "the gateway's operator can change that with --upstream-protocol generate or auto",
    ProtocolChoice.AUTO: "no upstream has /inference/v1/generate, which is vLLM's --enable-scale-out",
}


class Protocols:
    """Knows which API each upstream is asked by, and finds it out."""

    def __init__(self, choice: ProtocolChoice, forwarder: Forwarder, clock: Clock) -> None:
        self._choice = choice
        self._forwarder = forwarder
        self._clock = clock
        self._throttle = Throttle(_LOG_EVERY_S)

    def upstream(self, url: str) -> Upstream:
        """Make an upstream that is asked by the chosen API."""
        generates = self._choice is ProtocolChoice.GENERATE
        protocol = UpstreamProtocol.GENERATE if generates else UpstreamProtocol.COMPLETIONS
        return Upstream(url, protocol=protocol, protocol_known=self._choice is not ProtocolChoice.AUTO)

    async def learn(self, upstream: Upstream) -> None:
        """Ask the upstream which API it has, unless that is known or was chosen. Without an answer, ask next time."""
        if upstream.protocol_known and not upstream.lacks_generate:
            return
        answer = await self._forwarder.ask(
            upstream, upstream.samples_urls[UpstreamProtocol.GENERATE], PROBE_BODY, _TIMEOUT_S, PROBE_REQUEST_ID
        )
        found = has_generate(answer[0]) if not isinstance(answer, Fault) else None
        if self._choice is ProtocolChoice.GENERATE:
            upstream.lacks_generate = not found
        elif found is not None:
            upstream.protocol = UpstreamProtocol.GENERATE if found else UpstreamProtocol.COMPLETIONS
            upstream.protocol_known = True

    def doubt(self, upstream: Upstream) -> None:
        """Forget the answer of an upstream that broke: what comes back may have another endpoint."""
        if self._choice is ProtocolChoice.AUTO:
            upstream.protocol_known = False

    def without_generate(self, upstream: Upstream, fault: Fault) -> Fault:
        """Note that the upstream has no /inference/v1/generate; return the fault of the sample that found out.

        With `auto` the sample was never executed, and goes to the other endpoint.
        """
        if self._choice is not ProtocolChoice.AUTO:
            upstream.lacks_generate = True
            # Clients get the message, too, but only the operator can fix it.
            not_logged = self._throttle.allow(upstream.url, self._clock.monotonic_s())
            if not_logged is not None:
                fields = {"upstream": upstream.url, "error": fault.for_operators, "samples_not_told": not_logged}
                log.warning(NO_GENERATE, extra=fields)
            return fault
        upstream.protocol, upstream.protocol_known = UpstreamProtocol.COMPLETIONS, True
        return replace(fault, kind=FaultClass.NEVER_EXECUTED)

    def other(self, upstream: Upstream, fault: Fault) -> UpstreamProtocol | None:
        """Name the other endpoint to try after a refusal, or return None.

        With `auto` nobody has asked for generations, whose bounds are narrower in places: n, and the top-k by one.
        """
        if self._choice is ProtocolChoice.AUTO and fault.invalid and upstream.protocol is UpstreamProtocol.GENERATE:
            return UpstreamProtocol.COMPLETIONS
        return None

    def may_generate(self, upstream: Upstream) -> bool:
        return upstream.protocol is UpstreamProtocol.GENERATE or not upstream.protocol_known

    def refusal(self, beyond: str) -> str:
        """Explain why completions cannot answer this sample. `beyond` is from `vllm.beyond_completions`."""
        return f"{beyond}: {_REMEDIES.get(self._choice, '')}"

    def unable(self, upstream: Upstream, beyond: str) -> Fault | None:
        """Return why a sample that completions cannot answer cannot be sent there, or None if it can."""
        if upstream.protocol is UpstreamProtocol.GENERATE:
            return None
        if not upstream.protocol_known:
            return Fault(FaultClass.NEVER_EXECUTED, "the upstream has not answered yet which API it has")
        return Fault(FaultClass.REFUSED, self.refusal(beyond), Category.USER)
