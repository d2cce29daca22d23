"""Choose which of vLLM's two endpoints an upstream is asked for samples, and find out whether it has the second."""

from __future__ import annotations

from enum import Enum
from typing import Final


class UpstreamProtocol(Enum):
    COMPLETIONS = "completions"
    GENERATE = "generate"

    @property
    def path(self) -> str:
        return _PATHS[self]


class ProtocolChoice(Enum):
    """The values of `--upstream-protocol`. AUTO: what each upstream has."""

    COMPLETIONS = "completions"
    GENERATE = "generate"
    AUTO = "auto"


class ClientChoice(Enum):
    """The values of `--upstream-client`."""

    OWN = "own"
    AIOHTTP = "aiohttp"


_PATHS: Final = {
    UpstreamProtocol.COMPLETIONS: "/v1/completions",
    UpstreamProtocol.GENERATE: "/inference/v1/generate",
}
# A generation that lacks all that it needs: where the endpoint is, it is refused before anything is scheduled.
PROBE_BODY: Final = b"{}"
# For operators who gave `--upstream-protocol generate`.
NO_GENERATE: Final = (
    "samples fail for want of /inference/v1/generate; start vLLM with --enable-scale-out, "
    "or give --upstream-protocol completions or auto"
)
# vLLM's own validation, and that of a router or of its Rust frontend.
_REFUSED_AS_INVALID: Final = frozenset({400, 422})
# 403 is vLLM's without --enable-scale-out; a 200 comes from something that takes anything.
_NOT_THERE: Final = frozenset({200, 403, 404, 405, 501})


def has_generate(status: int) -> bool | None:
    """Return what the status of an answer to `PROBE_BODY` shows; None means nothing yet, ask again."""
    if status in _REFUSED_AS_INVALID:
        return True
    return False if status in _NOT_THERE else None
