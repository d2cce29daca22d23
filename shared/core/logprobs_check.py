"""Decide whether an upstream's sampled logprobs follow the temperature, from one distribution at two temperatures.

The logprobs that a client trains on must be those of the distribution that was sampled from. vLLM reports them so with
`--logprobs-mode processed_logprobs`; its default reports the raw log-softmax, which is the same at every temperature.

For one prompt the first sampled position has the same logits z at every temperature T, and processed logprobs are z / T
- log sum exp(z / T). The last term is unknown but common to all tokens, so the *difference* of two tokens' logprobs is
their difference in z, over T. From T = 1 to T = 0.5 it doubles if processed, and stays if raw. Which token was sampled
does not matter, so answers to several seeds, or the top logprobs of one answer, may simply be put together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

# Sent as X-Request-Id, so that a probe can be distinguished from a sample upstream.
PROBE_REQUEST_ID: Final = "gateway-probe"
# The two temperatures to ask with.
AT_ONE: Final = 1.0
AT_HALF: Final = 0.5
# Batches change float16 logits by some thousandths; a tenth of a nat apart, a ratio of 1 cannot pass for one of 2.
_LEAST_DIFFERENCE: Final = 0.1
# Half way between raw (1) and processed (2).
_BOUNDARY: Final = 1.5
# vLLM clamps -inf to this: it is no measurement.
_CLAMPED: Final = -9999.0


def logprobs_scale(at_one: Mapping[int, float], at_half: Mapping[int, float]) -> bool | None:
    """Return whether the logprobs follow the temperature (False: they are raw). None if this cannot be decided.

    It cannot with fewer than two tokens in common, or with logprobs that are too alike.

    Both map token ids to logprobs (nats) at the first sampled position of one prompt, at temperatures 1 and 0.5.
    """
    common = [token for token in at_one if min(at_one[token], at_half.get(token, _CLAMPED)) > _CLAMPED]
    if not common:
        return None
    lowest, highest = min(common, key=at_one.__getitem__), max(common, key=at_one.__getitem__)
    apart = at_one[highest] - at_one[lowest]
    if apart < _LEAST_DIFFERENCE:
        return None
    return (at_half[highest] - at_half[lowest]) / apart > _BOUNDARY
