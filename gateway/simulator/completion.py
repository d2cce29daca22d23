"""Generate the answer to a request: its tokens, where it ends, and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from gateway.simulator import tokens as oracle

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gateway.simulator.ask import Ask


@dataclass(frozen=True, slots=True)
class Choice:
    """One generated sequence; logprobs are as reported at the request's temperature."""

    seed: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: str
    stop_reason: int | str | None
    scaled: bool = True  # by the temperature


def generate(ask: Ask, fresh_seed: int, *, raw_logprobs: bool = False) -> list[Choice]:
    """Return all choices of a request. `fresh_seed`, below `tokens.UNSEEDED`, is used if the request has no seed."""
    seed = ask.seed if ask.seed is not None else fresh_seed
    seeds = [oracle.GREEDY_SEED] if ask.temperature == 0.0 else [seed + index for index in range(ask.n)]
    return [_generate_one(ask, one, raw_logprobs) for one in seeds]


def _generate_one(ask: Ask, seed: int, raw_logprobs: bool) -> Choice:
    drawn, logprobs = oracle.sampled(ask.model, ask.prompt, seed, ask.max_tokens)
    length, finish_reason, stop_reason = _end(ask, drawn)
    reported = logprobs if raw_logprobs else oracle.reported(logprobs, ask.temperature)
    return Choice(seed, drawn[:length], reported[:length], finish_reason, stop_reason, not raw_logprobs)


def _end(ask: Ask, drawn: NDArray[np.int32]) -> tuple[int, str, int | str | None]:
    """Return the number of tokens kept, finish_reason and stop_reason. The first stop counts; its token is kept."""
    ends: list[tuple[int, str, int | str | None]] = [(len(drawn), "length", None)]
    if not ask.ignore_eos:
        ends += [(int(at) + 1, "stop", None) for at in np.flatnonzero(drawn == oracle.EOS)[:1]]
    if ask.stop_token_ids:
        hits = np.flatnonzero(np.isin(drawn, list(ask.stop_token_ids)))[:1]
        ends += [(int(at) + 1, "stop", int(drawn[at])) for at in hits]
    if ask.stop:
        ends += _stop_string_ends(ask.stop, drawn)
    # A stop on the very last token is a stop, not a length.
    return min(ends, key=lambda end: (end[0], end[1] == "length"))


def _stop_string_ends(stops: tuple[str, ...], drawn: NDArray[np.int32]) -> list[tuple[int, str, int | str | None]]:
    texts = [oracle.text_of(int(token)) for token in drawn]
    whole = "".join(texts)
    ends: list[tuple[int, str, int | str | None]] = []
    for stop in stops:
        at = whole.find(stop)
        if at >= 0:
            ends.append((_tokens_up_to(texts, at + len(stop)), "stop", stop))
    return ends


def _tokens_up_to(texts: list[str], characters: int) -> int:
    """Return how many tokens cover the first `characters` of the text."""
    ends = accumulate(map(len, texts))
    return next((count for count, end in enumerate(ends, 1) if end >= characters), len(texts))
