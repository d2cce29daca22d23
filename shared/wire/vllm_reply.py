"""What vLLM's `/v1/completions` answers, as packed bytes; or why it is no answer.

Nothing is made up. A count, a length or a value that does not fit is an AMBIGUOUS fault that says what was wrong: never
zeros in place of logprobs, never a wrapped token id, never fewer sequences than were promised. Numbers go from the
parser's buffers into numpy; only the top-k and prompt scores, which vLLM tells as objects, cost an object per token.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shared.core.faults import Fault, FaultClass, upstream_words
from shared.core.frozen import Frozen
from shared.core.result import PromptScores, SampleResult, SequenceResult, StopReason, TopK
from shared.wire import document

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from shared.core.model import SampleSpec
    from shared.wire.document import Body, Value
    from shared.wire.vllm_request import UpstreamCall

_INT32_MAX: Final = 2**31 - 1
_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
_SMALL_BYTES: Final = 16 * 1024
# How the SDK tells that a cell of a top-k row is empty.
_EMPTY_LOGPROB: Final = -99999.0
_TOKEN_KEY: Final = "token_id:"
_TOKEN: Final = re.compile(_TOKEN_KEY + "[0-9]+")
_STOP_REASONS: Final = {
    "stop": StopReason.STOP,
    "length": StopReason.LENGTH,
    # vLLM's own detector of endless repetition ended it: it will not go on.
    "repetition": StopReason.STOP,
}


class Decoded(Frozen, frozen=True):
    """One reply. `sequences` in the order of their index; `cached_tokens`: prompt tokens found in the prefix cache."""

    sequences: tuple[SequenceResult, ...]
    scores: PromptScores | None
    cached_tokens: int


class _ReplyError(Exception):
    """A 200 that is not a result; the text says what was wrong, after "upstream answered 200"."""


class _AbortedError(Exception):
    """The engine gave the request up after `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.tokens = tokens


def decode_reply(
    call: UpstreamCall, spec: SampleSpec, body: Body, load: Callable[[Body], Value] = document.load
) -> Decoded | Fault:
    """The sequences and scores in the body of a 200, or why it is no result.

    An engine that gave up is ABORTED, or NEVER_EXECUTED when it had not made a token (it drains, or is paused).
    `load`: one of `document.LOADERS`.
    """
    try:
        return _decode(call, spec, _loaded(body, load))
    except _AbortedError as aborted:
        kind = FaultClass.ABORTED if aborted.tokens else FaultClass.NEVER_EXECUTED
        return Fault(kind, f"upstream's engine aborted the request after {aborted.tokens} tokens")
    except _ReplyError as error:
        return Fault(FaultClass.AMBIGUOUS, f"upstream answered 200 {error}")
    except document.UNREADABLE as error:
        return Fault(FaultClass.AMBIGUOUS, f"upstream answered 200 with what is no completion ({_short(error)})")


def combine(spec: SampleSpec, decoded: Sequence[Decoded]) -> SampleResult:
    """All replies of an attempt as one result, with as many sequences as were promised.

    A greedy sample has one sequence, n times. The cache hits are those of the sampling request, which comes last.
    """
    sequences = tuple(sequence for part in decoded for sequence in part.sequences)
    if len(sequences) == 1 < spec.num_samples:
        sequences *= spec.num_samples
    scores = next((part.scores for part in decoded if part.scores is not None), None)
    return SampleResult(sequences, scores, decoded[-1].cached_tokens)


def _loaded(body: Body, load: Callable[[Body], Value]) -> Value:
    try:
        reply = load(body)
        look_up = reply.get
        told = look_up("error") if _may_tell_an_error(body) else None
    except document.UNREADABLE as error:
        raise _ReplyError(f"with {_what_it_is(body)} ({_short(error)})") from None
    if told:
        raise _ReplyError(f"with an error inside: {upstream_words(body)}")
    return reply


def _may_tell_an_error(body: Body) -> bool:
    """To look for a key that is not there costs as much as to parse a small reply."""
    return len(body) > _SMALL_BYTES or b"error" in body


def _what_it_is(body: Body) -> str:
    start = body[:64].lstrip()
    if not start:
        return "an empty body"
    if start.startswith(b"<"):
        return "HTML instead of JSON"
    if b"NaN" in body or b"Infinity" in body:
        return "NaN or Infinity, which is no JSON"
    return "what is no JSON object, or was cut"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:120]


def _decode(call: UpstreamCall, spec: SampleSpec, reply: Value) -> Decoded:
    choices = _choices_in_order(reply["choices"], max(call.sequences, 1))
    sequences = tuple(_sequence(spec, choice) for choice in choices) if call.sequences else ()
    # With several choices each repeats the prompt's scores: the first will do.
    scores = _prompt_scores(spec, choices[0].get("prompt_logprobs")) if call.scores else None
    return Decoded(sequences, scores, _cached_tokens(reply))


def _choices_in_order(choices: Value, wanted: int) -> list[Value]:
    """One aborted choice spoils all: they belong to one promise."""
    if (
        wanted == 1
        and len(choices) == 1
        and (only := choices[0]).get("finish_reason") != "abort"
        and only["index"] == 0
    ):
        return [only]
    if any(choice.get("finish_reason") == "abort" for choice in choices):
        raise _AbortedError(sum(_tokens_made(choice) for choice in choices))
    if len(choices) != wanted:
        raise _ReplyError(f"with {len(choices)} choices where {wanted} were asked for")
    by_index = {choice["index"]: choice for choice in choices}
    if by_index.keys() != set(range(wanted)):
        raise _ReplyError(f"with choices numbered {sorted(by_index)[:8]} where {wanted} were asked for")
    return [by_index[index] for index in range(wanted)]


def _tokens_made(choice: Value) -> int:
    ids = choice.get("token_ids")
    scored = choice.get("logprobs")
    values = scored.get("token_logprobs") if scored is not None else None
    return max(len(told) if told is not None else 0 for told in (ids, values))


def _sequence(spec: SampleSpec, choice: Value) -> SequenceResult:
    finish_reason = choice.get("finish_reason")
    if finish_reason not in _STOP_REASONS:
        raise _ReplyError(f"with the finish_reason {finish_reason!r}")
    scored = choice.get("logprobs")
    if scored is None:
        raise _ReplyError("without logprobs")
    tokens = _token_ids(choice.get("token_ids"), scored)
    logprobs = _logprobs(scored["token_logprobs"])
    if len(tokens) != len(logprobs):
        raise _ReplyError(f"with {len(tokens)} token ids and {len(logprobs)} logprobs")
    topk = _sampled_topk(scored, spec.topk_sample_logprobs, len(tokens))
    return SequenceResult(tokens.astype("<i4").tobytes(), _packed(logprobs), _STOP_REASONS[finish_reason], topk)


def _token_ids(token_ids: Value, scored: Value) -> NDArray[np.int64]:
    """vLLM before `return_token_ids` tells the ids as `token_id:N` texts only."""
    if token_ids is None:
        return _ids_of(document.plain(scored["tokens"]))
    try:
        ids = document.integers(token_ids)
    except document.UNREADABLE as error:
        raise _ReplyError(f"with token ids that are not all integers ({_short(error)})") from None
    # Seen without its sign, what is negative is larger than all that is allowed.
    if len(ids) and ids.view(np.uint64).max() > _INT32_MAX:
        raise _ReplyError(f"with token ids from {ids.min()} to {ids.max()}, which are not all in 0 .. 2**31 - 1")
    return ids


def _logprobs(values: Value) -> NDArray[np.float64]:
    try:
        return document.floats(values)
    except document.UNREADABLE as error:
        raise _ReplyError(f"with logprobs that are not all numbers ({_short(error)})") from None


def _packed(logprobs: NDArray[np.float64]) -> bytes:
    """float32, little-endian. NaN is for prompt positions that were not computed; infinity is for none."""
    if logprobs.min(initial=0.0) >= -_FLOAT32_MAX and logprobs.max(initial=0.0) <= _FLOAT32_MAX:
        return logprobs.astype("<f4").tobytes()
    # NaN compares as false.
    with np.errstate(over="ignore"):
        narrow = logprobs.astype("<f4")
    if np.isinf(narrow).any():
        raise _ReplyError("with a logprob that no 32-bit float holds")
    return narrow.tobytes()


# -- top-k and prompt scores --------------------------------------------------------------------------------------


def _sampled_topk(scored: Value, k: int, tokens: int) -> TopK | None:
    if not k:
        return None
    rows = document.plain(scored["top_logprobs"])
    if len(rows) != tokens:
        raise _ReplyError(f"with {tokens} token ids and {len(rows)} rows of top_logprobs")
    ids = _ids_of([key for row in rows for key in row])
    return _topk(ids, _numbers([value for row in rows for value in row.values()]), [len(row) for row in rows], k)


def _ids_of(texts: Sequence[Any]) -> NDArray[np.int64]:
    """Of `token_id:N` texts. There may be a million, so all are looked at in each step, and none by itself."""
    digits = [text[len(_TOKEN_KEY) :] for text in texts if type(text) is str and text.startswith(_TOKEN_KEY)]
    if len(digits) != len(texts) or not _are_decimal(digits):
        wrong = next(text for text in texts if not _TOKEN.fullmatch(str(text)))
        raise _ReplyError(f"with a token told as {str(wrong)[:20]!r} instead of {_TOKEN_KEY}N")
    return _in_int32(digits)


def _are_decimal(digits: Sequence[str]) -> bool:
    told = "".join(digits)
    return not digits or ("" not in digits and told.isascii() and told.isdecimal())


def _in_int32(digits: Sequence[str]) -> NDArray[np.int64]:
    # Ten digits are more than enough, and few enough for int64.
    too_long = max(map(len, digits), default=0) > 10
    ids = np.array([] if too_long else [int(text) for text in digits], np.int64)
    if too_long or ids.max(initial=0) > _INT32_MAX:
        raise _ReplyError("with a token id above 2**31 - 1")
    return ids


def _numbers(values: Sequence[Any]) -> NDArray[np.float64]:
    """float64[len]; left to itself numpy makes a NaN of None, and a number of a text."""
    if not all(type(value) in (float, int) for value in values):
        wrong = next(value for value in values if type(value) not in (float, int))
        raise _ReplyError(f"with the logprob {wrong!r}")
    numbers = np.array(values, np.float64)
    if not np.isfinite(numbers).all():
        raise _ReplyError("with a logprob that is not finite")
    return numbers


def _topk(ids: NDArray[np.int64], logprobs: NDArray[np.float64], lengths: Sequence[int], k: int) -> TopK:
    """The k best of each row, the best first, filled up as the SDK reads them. `lengths`: of the rows in `ids`.

    vLLM adds the token itself to a row when it is not among the k best: it falls off at the end.
    """
    counts = np.array(lengths, np.int64)
    shape = (len(counts), max(k, int(counts.max(initial=0))))
    row = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    cell_ids, cell_logprobs = np.zeros(shape, np.int64), np.full(shape, -np.inf)
    cell_ids[row, column], cell_logprobs[row, column] = ids, logprobs
    best = np.argsort(-cell_logprobs, axis=1, kind="stable")[:, :k]
    best_ids, best_logprobs = (np.take_along_axis(cells, best, axis=1) for cells in (cell_ids, cell_logprobs))
    best_logprobs[np.isneginf(best_logprobs)] = _EMPTY_LOGPROB
    return TopK(best_ids.astype("<i4").tobytes(), _packed(best_logprobs), k, len(counts))


def _prompt_scores(spec: SampleSpec, told: Value) -> PromptScores:
    rows = document.plain(told) if told is not None else None
    if rows is None or len(rows) != spec.prompt_tokens:
        count = "no" if rows is None else len(rows)
        raise _ReplyError(f"with {count} prompt_logprobs for {spec.prompt_tokens} prompt tokens")
    # The first token has no predecessor to be scored from.
    first = spec.prompt_tokens - spec.prompt_logprobs_last_n if spec.prompt_logprobs_last_n is not None else 1
    logprobs = _own_logprobs(spec, rows, first) if spec.prompt_logprobs else None
    k = spec.topk_prompt_logprobs
    return PromptScores(logprobs, _prompt_topk(rows, first, k) if k else None)


def _own_logprobs(spec: SampleSpec, rows: Sequence[Any], first: int) -> bytes:
    """Each prompt token's own logprob, found by its id: the order within a row is not a promise."""
    values = np.full(len(rows), np.nan, np.float64)
    tokens = spec.prompt.decode().split(",")
    values[first:] = _numbers([_own(rows[place], tokens[place], place) for place in range(first, len(rows))])
    return _packed(values)


def _own(row: Any, token: str, place: int) -> Any:
    if not row or token not in row:
        raise _ReplyError(f"without the logprob of the prompt token at position {place}")
    return row[token]["logprob"]


def _prompt_topk(rows: Sequence[Any], first: int, k: int) -> TopK:
    scored = rows[first:]
    if not all(scored):
        raise _ReplyError("without the prompt_logprobs of some position")
    keys = [key for row in scored for key in row]
    if not _are_decimal(keys):
        raise _ReplyError("with prompt_logprobs whose keys are not token ids")
    values = _numbers([entry["logprob"] for row in scored for entry in row.values()])
    return _topk(_in_int32(keys), values, [0] * first + [len(row) for row in scored], k)


def _cached_tokens(reply: Value) -> int:
    """Told for information only, and by some servers not at all: no generation is thrown away for it."""
    try:
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    except document.UNREADABLE:
        return 0
    return cached if type(cached) is int and 0 <= cached <= _INT32_MAX else 0
