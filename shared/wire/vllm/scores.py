"""Read what all replies of vLLM have in one form: numbers to pack, top-k rows, the prompt's scores.

Only the top-k and the prompt's scores, which vLLM writes as objects, cost a Python object per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shared.core.faults import FaultClass
from shared.core.result import EMPTY_LOGPROB, PromptScores, TopK
from shared.wire import json_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shared.core.model import SampleSpec
    from shared.wire.json_arrays import JsonValue

_INT32_MAX: Final = 2**31 - 1
# A probability of 1 may come out a little above it.
_LARGEST_LOGPROB: Final = 0.001
_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)


class ReplyError(Exception):
    """A 200 that is not a result; the text says what was wrong, after "upstream answered 200"."""

    kind = FaultClass.AMBIGUOUS


class WrongReply(ReplyError):
    """A reply that vLLM never gives to this request: another's, or a broken server's. The sample is executed again."""

    kind = FaultClass.WRONG_REPLY


def token_ids(values: JsonValue) -> NDArray[np.int64]:
    """Return the ids as int64[len], all in 0 .. 2**31 - 1. Raises `ReplyError`."""
    try:
        ids = json_arrays.integers(values)
    except json_arrays.NestedArray:
        raise WrongReply("with a list among the token ids") from None
    except (OverflowError, ValueError):
        raise WrongReply("with a token id that no 64-bit integer holds") from None
    except json_arrays.UNREADABLE as error:
        raise ReplyError(f"with token ids that are not all integers ({short(error)})") from None
    # Read without its sign, a negative id is larger than all that is allowed.
    if len(ids) and ids.view(np.uint64).max() > _INT32_MAX:
        raise WrongReply("with token ids that are not all in 0 .. 2**31 - 1")
    return ids


def sampled_logprobs(values: JsonValue) -> NDArray[np.float64]:
    """Return the logprobs as float64[len], none above rounding. Raises `ReplyError`."""
    try:
        logprobs = json_arrays.floats(values)
    except json_arrays.NestedArray:
        raise WrongReply("with a list among the logprobs") from None
    except json_arrays.UNREADABLE as error:
        raise ReplyError(f"with logprobs that are not all numbers ({short(error)})") from None
    if logprobs.max(initial=0.0) > _LARGEST_LOGPROB:
        raise WrongReply("with a logprob above 0")
    return logprobs


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:120]


def packed(logprobs: NDArray[np.float64]) -> bytes:
    """Pack as little-endian float32. NaN marks prompt positions that were not computed; infinity is refused."""
    if logprobs.min(initial=0.0) >= -_FLOAT32_MAX and logprobs.max(initial=0.0) <= _FLOAT32_MAX:
        return logprobs.astype("<f4").tobytes()
    # NaN compares as false.
    with np.errstate(over="ignore"):
        narrow = logprobs.astype("<f4")
    if np.isinf(narrow).any():
        raise ReplyError("with a logprob that no 32-bit float holds")
    return narrow.tobytes()


def are_decimal(digits: Sequence[str]) -> bool:
    text = "".join(digits)
    return not digits or ("" not in digits and text.isascii() and text.isdecimal())


def in_int32(digits: Sequence[str]) -> NDArray[np.int64]:
    # Ten digits are more than enough, and few enough for int64.
    too_long = max(map(len, digits), default=0) > 10
    ids = np.array([] if too_long else [int(text) for text in digits], np.int64)
    if too_long or ids.max(initial=0) > _INT32_MAX:
        raise WrongReply("with a token id above 2**31 - 1")
    return ids


def numbers(values: Sequence[Any]) -> NDArray[np.float64]:
    """Return float64[len]. Raises `ReplyError` for None and texts, of which numpy would make numbers."""
    if not all(type(value) in (float, int) for value in values):
        wrong = next(value for value in values if type(value) not in (float, int))
        raise ReplyError(f"with the logprob {wrong!r}")
    array = np.array(values, np.float64)
    if not np.isfinite(array).all():
        raise ReplyError("with a logprob that is not finite")
    return array


def topk_rows(ids: NDArray[np.int64], logprobs: NDArray[np.float64], lengths: Sequence[int], k: int) -> TopK:
    """Return the k best of each row, best first, padded as the SDK reads them. `lengths`: of the rows in `ids`.

    vLLM adds the sampled token to a row if it is not among the k best; it is cut off at the end.
    """
    counts = np.array(lengths, np.int64)
    shape = (len(counts), max(k, int(counts.max(initial=0))))
    row = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    cell_ids, cell_logprobs = np.zeros(shape, np.int64), np.full(shape, -np.inf)
    cell_ids[row, column], cell_logprobs[row, column] = ids, logprobs
    best = np.argsort(-cell_logprobs, axis=1, kind="stable")[:, :k]
    best_ids, best_logprobs = (np.take_along_axis(cells, best, axis=1) for cells in (cell_ids, cell_logprobs))
    best_logprobs[np.isneginf(best_logprobs)] = EMPTY_LOGPROB
    return TopK(best_ids.astype("<i4").tobytes(), packed(best_logprobs), k, len(counts))


def prompt_scores(spec: SampleSpec, listed: JsonValue) -> PromptScores:
    """Return the scores of the prompt from the rows of `prompt_logprobs`. Raises `ReplyError`."""
    rows = json_arrays.plain(listed) if listed is not None else None
    if rows is None or len(rows) != spec.prompt_tokens:
        count = "no" if rows is None else len(rows)
        raise ReplyError(f"with {count} prompt_logprobs for {spec.prompt_tokens} prompt tokens")
    # The first token has no predecessor to be scored from.
    last_n = spec.prompt_logprobs_last_n
    # What a client expects of its images may be more than they come to.
    first = max(spec.prompt_tokens - last_n, 1) if last_n is not None else 1
    logprobs = _own_logprobs(spec, rows, first) if spec.prompt_logprobs else None
    k = spec.topk_prompt_logprobs
    return PromptScores(logprobs, _prompt_topk(rows, first, k) if k else None)


def _own_logprobs(spec: SampleSpec, rows: Sequence[Any], first: int) -> bytes:
    """Return each prompt token's own logprob, found by its id: vLLM promises no order within a row."""
    values = np.full(len(rows), np.nan, np.float64)
    tokens = spec.prompt.decode().split(",")
    for place in range(first, len(rows)):
        if not rows[place] or tokens[place] not in rows[place]:
            raise ReplyError(f"without the logprob of the prompt token at position {place}")
    values[first:] = numbers([rows[place][tokens[place]]["logprob"] for place in range(first, len(rows))])
    return packed(values)


def _prompt_topk(rows: Sequence[Any], first: int, k: int) -> TopK:
    scored = rows[first:]
    if not all(scored):
        raise ReplyError("without the prompt_logprobs of some position")
    keys = [key for row in scored for key in row]
    if not are_decimal(keys):
        raise ReplyError("with prompt_logprobs whose keys are not token ids")
    values = numbers([entry["logprob"] for row in scored for entry in row.values()])
    return topk_rows(in_int32(keys), values, [0] * first + [len(row) for row in scored], k)
