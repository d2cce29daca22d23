"""The answers of the simulated vLLM as pure functions, so that any client can check that a result is its own.

This file needs only the standard library and numpy: copy it to wherever results are checked.

    tokens      sampled(model, prompt, seed, n): tokens int32[n] and their logprobs float32[n] at temperature 1
    choices     choice i of a request is drawn with seed + i, as in vLLM
    temperature does not change the tokens; reported logprobs are those of temperature 1 divided by it (`reported`),
                unless the simulator runs with --logprobs-mode raw. Prompt logprobs never change.
    no seed     a seed below UNSEEDED is drawn; `find_seed` recovers it from the tokens
    greedy      temperature 0 uses GREEDY_SEED
    end         only a prompt that ends with ASKS_TO_END makes the model end by itself: EOS is then drawn at position
                `end_position`. With `ignore_eos` the generation continues after it
    images      each IMAGE in a prompt becomes the tokens of its image (`expanded`), before anything is drawn
    text        the text of token t is `text_of(t)`

All draws are splitmix64 over a key that hashes model and prompt. Two prompts share nothing, so somebody else's result
differs from the first token on.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

VOCAB = 32_000
EOS = 2
ASKS_TO_END = 7
IMAGE = 3
GREEDY_SEED = 0x5EED_0F_6EED
UNSEEDED = 1 << 16
# Logprobs at temperature 1 lie between 0 and minus this.
_DEEPEST = 12.0
_FIRST_TOKEN = 8
_MASK = (1 << 64) - 1
# splitmix64's published constants.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_TOKENS, _LOGPROBS, _ALTERNATIVES, _PROMPT, _END = range(1, 6)
# Made once: creating a numpy scalar costs more than using it on a short array.
_U64_MIX_1, _U64_MIX_2 = np.uint64(_MIX_1), np.uint64(_MIX_2)
_U64_27, _U64_30, _U64_31, _U64_11 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(11)
_U64_SPAN = np.uint64(VOCAB - _FIRST_TOKEN)
# A run uses one or two lengths; the longest takes 2 MB.
_KEPT_LENGTHS = 4


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64's finaliser to each element."""
    values = (values ^ (values >> _U64_30)) * _U64_MIX_1
    values = (values ^ (values >> _U64_27)) * _U64_MIX_2
    return values ^ (values >> _U64_31)


@lru_cache(_KEPT_LENGTHS)
def _counters(n: int) -> NDArray[np.uint64]:
    """Return the shared, read-only uint64[n] that is added to a key, one value per draw."""
    counters = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    counters.flags.writeable = False
    return counters


def _draws(key: int, n: int) -> NDArray[np.uint64]:
    """Return n 64-bit draws under a key."""
    return _mix(_counters(n) + np.uint64(key & _MASK))


def _key(base: int, *parts: int) -> int:
    """Mix the parts into a key; plain integers cost a tenth of numpy arrays of length one."""
    for part in parts:
        base = _mix_one(((base ^ part) + _GOLDEN) & _MASK)
    return base


def _mix_one(value: int) -> int:
    """Apply `_mix` to one plain integer."""
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _base(model: str, prompt: ArrayLike) -> int:
    data = np.asarray(prompt, dtype="<i4").tobytes()
    return int.from_bytes(blake2b(model.encode() + b"\0" + data, digest_size=8).digest(), "little")


def _units(draws: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Map draws to floats, uniform in [0, 1)."""
    return (draws >> _U64_11).astype(np.float64) * 2.0**-53


def sampled(model: str, prompt: ArrayLike, seed: int, n: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Draw tokens int32[n] and logprobs float32[n] at temperature 1; `seed` is the request's seed + choice."""
    base = _base(model, prompt)
    key = _key(base, seed)
    # Both rows in one pass: for short results the calls cost more than the arithmetic.
    keys = np.array([[_key(key, _TOKENS)], [_key(key, _LOGPROBS)]], np.uint64)
    drawn, units = _mix(_counters(n) + keys)
    tokens = (drawn % _U64_SPAN).astype(np.int32)
    tokens += _FIRST_TOKEN
    logprobs = (-_DEEPEST * _units(units)).astype(np.float32)
    end = _end_position(base, prompt)
    if end is not None and end < n:
        tokens[end] = EOS
    return tokens, logprobs


def end_position(model: str, prompt: ArrayLike) -> int | None:
    """Return the index of EOS, where the model ends by itself, or None if it never does."""
    return _end_position(_base(model, prompt), prompt)


def _end_position(base: int, prompt: ArrayLike) -> int | None:
    last = int(np.asarray(prompt).reshape(-1)[-1])
    return _key(base, _END) % 24 + 4 if last == ASKS_TO_END else None


def reported(logprobs: NDArray[np.float32], temperature: float) -> NDArray[np.float32]:
    """Return float32[n]: logprobs as reported at a temperature (`--logprobs-mode processed_logprobs`)."""
    return logprobs if temperature == 0.0 else (logprobs / np.float32(temperature)).astype(np.float32)


def find_seed(model: str, prompt: ArrayLike, tokens: ArrayLike) -> int | None:
    """Recover the seed of the first choice of a request that had none."""
    wanted = np.asarray(tokens, np.int32)
    for seed in np.flatnonzero(_first_tokens(_base(model, prompt)) == wanted[0]).tolist():
        if np.array_equal(sampled(model, prompt, seed, len(wanted))[0], wanted):
            return int(seed)
    return None


def _first_tokens(base: int) -> NDArray[np.int64]:
    """Return int64[UNSEEDED]: the first token that `sampled` draws with each seed."""
    keys = np.uint64(base) ^ np.arange(UNSEEDED, dtype=np.uint64)
    for part in (_TOKENS, 0):
        keys = _mix(keys + np.uint64(_GOLDEN)) ^ np.uint64(part)
    return _FIRST_TOKEN + (_mix(keys + np.uint64(_GOLDEN)) % np.uint64(VOCAB - _FIRST_TOKEN)).astype(np.int64)


def alternatives(
    model: str, prompt: ArrayLike, seed: int, n: int, k: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return int32[n, k], float32[n, k]: the k best other tokens at each position at temperature 1, best first."""
    return _alternatives(_key(_base(model, prompt), seed, _ALTERNATIVES), n, k)


def _alternatives(key: int, n: int, k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    draws = _draws(key, n)
    ranks = np.arange(k, dtype=np.uint64)
    # The ids of one row are 7919 apart modulo the vocabulary, so no two are equal.
    ids = (draws[:, None] + ranks[None, :] * np.uint64(7919)) % np.uint64(VOCAB)
    logprobs = -(0.05 + 0.4 * ranks[None, :].astype(np.float64) + 0.3 * _units(draws)[:, None])
    return ids.astype(np.int32), logprobs.astype(np.float32)


def prompt_logprobs(model: str, prompt: ArrayLike) -> NDArray[np.float32]:
    """Return float32[P]: the prompt's own logprobs at temperature 1; the first is NaN."""
    n = len(np.asarray(prompt))
    values = (-_DEEPEST * _units(_draws(_key(_base(model, prompt), _PROMPT), n))).astype(np.float32)
    values[0] = np.nan
    return values


def prompt_alternatives(model: str, prompt: ArrayLike, k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return int32[P, k], float32[P, k]: the k best other tokens at each position of the prompt, best first."""
    n = len(np.asarray(prompt))
    return _alternatives(_key(_base(model, prompt), _PROMPT, _ALTERNATIVES), n, k)


def best(
    own: int, own_logprob: float, ids: NDArray[np.int32], logprobs: NDArray[np.float32], k: int
) -> list[tuple[int, float]]:
    """Return the k best of one position: its own token and the alternatives, without a repeated id."""
    pairs = [(int(other), float(value)) for other, value in zip(ids, logprobs, strict=True) if int(other) != own]
    return sorted([(own, float(own_logprob)), *pairs], key=lambda pair: -pair[1])[:k]


def image_tokens(data: bytes) -> list[int]:
    """Return the tokens of an image, which depend on its bytes alone."""
    key = int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
    return [_FIRST_TOKEN + int(drawn) for drawn in _draws(key, 4 + key % 4) % _U64_SPAN]


def expanded(prompt: Sequence[int], images: Sequence[bytes]) -> tuple[list[int], list[tuple[int, int]]]:
    """Expand every image in a prompt; return the tokens, and the offset and length of each image.

    Raises `ValueError` if the numbers of placeholders and images differ.
    """
    tokens: list[int] = []
    spans: list[tuple[int, int]] = []
    unused = iter(images)
    for token in prompt:
        inside = image_tokens(image) if token == IMAGE and (image := next(unused, None)) is not None else [token]
        if token == IMAGE:
            spans.append((len(tokens), len(inside)))
        tokens += inside
    if len(spans) != len(images):
        raise ValueError(f"{len(spans)} placeholders for {len(images)} images")
    return tokens, spans


def tokens_of(text: str) -> list[int]:
    """Turn text into one token per byte; it does not imitate a real tokenizer."""
    return list(text.encode("utf-8", "replace"))


def text_of(token: int) -> str:
    return f" t{token}"
