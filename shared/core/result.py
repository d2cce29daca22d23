"""A sample's result on its way from the upstream's JSON to the SDK's protobuf: packed bytes, no object per token."""

from __future__ import annotations

from enum import Enum
from typing import Final

from shared.core.model import Value

# The limit for one sample, and for the reply that it is made from. Redis takes no value above 512 MiB, and clients hold
# all of it at once; three million sampled tokens fit.
LARGEST_RESULT_BYTES: Final = 256 * 1024 * 1024

_TOKEN_BYTES: Final = 4
# Fills a top-k row that has fewer than k entries.
EMPTY_LOGPROB: Final = -99999.0


class StopReason(Enum):
    STOP = "stop"
    LENGTH = "length"


class TopK(Value, frozen=True):
    """Top-k per position. `token_ids` int32[length * k], `logprobs` float32[length * k], little-endian, row-major.

    An empty cell is id 0, logprob -99999.0; a row whose first cell is empty reads as None in the SDK.
    """

    token_ids: bytes
    logprobs: bytes
    k: int
    length: int

    @property
    def size_bytes(self) -> int:
        return len(self.token_ids) + len(self.logprobs)


class SequenceResult(Value, frozen=True):
    """`tokens` int32[T], `logprobs` float32[T], little-endian."""

    tokens: bytes
    logprobs: bytes
    stop_reason: StopReason
    topk: TopK | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.tokens) + len(self.logprobs) + (self.topk.size_bytes if self.topk is not None else 0)


class PromptScores(Value, frozen=True):
    """`logprobs` float32[P], NaN where not computed (position 0 always); None when only the top-k was asked for."""

    logprobs: bytes | None = None
    topk: TopK | None = None


class SampleResult(Value, frozen=True):
    sequences: tuple[SequenceResult, ...]
    prompt: PromptScores | None = None
    prompt_cache_hit_tokens: int = 0

    @property
    def size_bytes(self) -> int:
        """Return the size of the sequences, which is what grows with n."""
        size_bytes = 0
        for sequence in self.sequences:
            size_bytes += sequence.size_bytes
        return size_bytes

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in all sequences."""
        return sum(len(sequence.tokens) for sequence in self.sequences) // _TOKEN_BYTES
