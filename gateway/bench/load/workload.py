"""What the load client asks for, as a pure function of one seed.

The prompt, the sampling seed and the misbehaviour of sample `i` are all drawn from (run seed, i). So no two samples
share a prompt, any process can recompute any sample, and the printed seed repeats a failed run.

This module needs only the standard library and numpy, since it also runs under the interpreter of an SDK.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

# Above the special tokens at the start of every real vocabulary, below the size of the smallest one in use.
PROMPT_TOKEN_MIN: Final = 100
PROMPT_TOKEN_MAX: Final = 30_000
_PROMPT_SPAN: Final = np.uint64(PROMPT_TOKEN_MAX - PROMPT_TOKEN_MIN)
# Two independent streams of draws: one for the sample, one for each of its polls.
_SAMPLE_STREAM: Final = 1
_POLL_STREAM: Final = 2
_SPLITMIX_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_SPLITMIX_FACTORS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SPLITMIX_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))
# A sample abandons at most this many polls, so that a run with a fraction of 1 still ends.
MAX_ABANDONED_POLLS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The samples of one run. Fractions are in 0..1, of all samples (`abandon_polls`: of all polls)."""

    seed: int
    model: str
    prompt_tokens: int = 64
    max_tokens: int = 32
    num_samples: int = 1
    abandon_polls: float = 0.0
    cancel: float = 0.0
    duplicates: float = 0.0
    # Polls are abandoned and samples cancelled within this many seconds, about as long as a generation takes.
    trouble_within_s: float = 1.0


class Duplicate(NamedTuple):
    """The way in which a sample is submitted twice, if it is; at most one of the two."""

    at_once: bool = False  # the same post on two connections
    reply_lost: bool = False  # the first post's connection is dropped before its reply is read


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample to draw. `prompt` is int32[prompt_tokens]; `cancel_after_s` is None if it is not cancelled."""

    index: int
    seed: int
    prompt: npt.NDArray[np.int32]
    cancel_after_s: float | None
    duplicate: Duplicate


def sample(workload: Workload, index: int) -> Sample:
    draws = _draws(workload.seed, _SAMPLE_STREAM, index)
    chance, half = _share(draws[5]), workload.duplicates / 2
    return Sample(
        index,
        seed=draws[0] >> 1,  # below 2**31, which every upstream takes
        prompt=_prompt(draws[1] << 32 | draws[2], workload.prompt_tokens),
        cancel_after_s=_share(draws[4]) * workload.trouble_within_s if _share(draws[3]) < workload.cancel else None,
        duplicate=Duplicate(at_once=chance < half, reply_lost=half <= chance < workload.duplicates),
    )


def abandon_after_s(
    workload: Workload, index: int, poll: int, abandoned: int, within_s: float | None = None
) -> float | None:
    """Return when to drop the `poll`-th poll of a sample that has dropped `abandoned` polls so far, or None.

    `within_s` is about how long such a poll takes; None uses the workload's `trouble_within_s`.
    """
    if workload.abandon_polls <= 0 or abandoned >= MAX_ABANDONED_POLLS:
        return None
    draws = _draws(workload.seed, _POLL_STREAM, index, poll)
    if _share(draws[0]) >= workload.abandon_polls:
        return None
    return _share(draws[1]) * (workload.trouble_within_s if within_s is None else within_s)


def _share(draw: int) -> float:
    return draw / 2**32


def _draws(*key: int) -> tuple[int, ...]:
    """Return eight numbers of 32 bits from a digest; seeding a numpy generator costs more than the rest of a sample."""
    return struct.unpack("<8I", blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=32).digest())


def _prompt(key: int, length: int) -> npt.NDArray[np.int32]:
    """Draw a prompt with splitmix64 over `key`, `key` + 1 step, ... in one vectorised pass."""
    state = _steps(length) + np.uint64(key)
    state = (state ^ (state >> _SPLITMIX_SHIFTS[0])) * _SPLITMIX_FACTORS[0]
    state = (state ^ (state >> _SPLITMIX_SHIFTS[1])) * _SPLITMIX_FACTORS[1]
    state ^= state >> _SPLITMIX_SHIFTS[2]
    prompt = (state % _PROMPT_SPAN).astype(np.int32)
    prompt += PROMPT_TOKEN_MIN
    return prompt


@lru_cache(1)
def _steps(length: int) -> npt.NDArray[np.uint64]:
    """Return the read-only uint64[length] that every prompt of a run shares."""
    steps = np.arange(1, length + 1, dtype=np.uint64) * _SPLITMIX_STEP
    steps.flags.writeable = False
    return steps
