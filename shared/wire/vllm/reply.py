"""Decode vLLM's replies into packed bytes, or into the fault that explains why there is no result.

Nothing is made up. A count, a length or a value that does not fit is an AMBIGUOUS fault that says what was wrong: never
zeros in place of logprobs, never a wrapped token id, never fewer sequences than were promised. `completions.py` and
`generate.py` read one choice of each endpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from shared.core.faults import Fault, FaultClass
from shared.core.model import Value
from shared.core.result import PromptScores, SampleResult, SequenceResult
from shared.core.upstream_protocol import UpstreamProtocol
from shared.core.upstream_text import upstream_words
from shared.wire import json_arrays
from shared.wire.vllm import completions, generate, long_reply, short_reply
from shared.wire.vllm.scores import ReplyError, WrongReply, packed, prompt_scores, short
from shared.wire.vllm.short_reply import STOP_REASONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shared.core.model import SampleSpec
    from shared.core.result import TopK
    from shared.wire.json_arrays import Body, JsonValue
    from shared.wire.vllm.request import UpstreamCall

_INT32_MAX: Final = 2**31 - 1
_SMALL_BYTES: Final = 16 * 1024
# From this size on it is read in parts, which costs less from a thousand tokens, and a third from a hundred thousand.
_LONG_BYTES: Final = 128 * 1024
# From this size on, finding and comparing the prompt's ids costs less than parsing them.
_LONG_PROMPT_BYTES: Final = 4 * 1024


class _Reader(Protocol):
    """Reads the choices of one endpoint; each has a module."""

    def count_tokens(self, choice: JsonValue) -> int: ...
    def sampled(self, choice: JsonValue) -> tuple[NDArray[np.int64], NDArray[np.float64]]: ...
    def sampled_topk(self, choice: JsonValue, k: int, tokens: int) -> TopK: ...
    def prompt_rows(self, reply: JsonValue, first_choice: JsonValue) -> JsonValue: ...


# By identity: to look a member of an Enum up by its hash costs as much as to read a short logprob list.
_GENERATE: Final = UpstreamProtocol.GENERATE


class Decoded(Value, frozen=True):
    """One reply. `sequences` are in the order of their index; `cached_tokens` were found in the prefix cache.

    `mixed` has the weight versions of each sequence during which the weights changed.
    """

    sequences: tuple[SequenceResult, ...]
    scores: PromptScores | None
    cached_tokens: int
    mixed: tuple[tuple[str, ...], ...] = ()


class _AbortedError(Exception):
    """Raised if the engine gave up the request after `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.tokens = tokens


def decode_reply(
    call: UpstreamCall, spec: SampleSpec, body: Body, load: Callable[[Body], JsonValue] | None = None
) -> Decoded | Fault:
    """Return the sequences and scores in the body of a 200, or the fault that explains why there are none.

    An engine that gave up is ABORTED, or NEVER_EXECUTED when it had not made a token (it drains, or is paused).
    `load` is one of `json_arrays.LOADERS`; by default it is the cheapest, with the same outcome.
    """
    plain = _is_plain(call, spec)
    if load is None and call.protocol is not _GENERATE:
        prompt = spec.prompt if len(spec.prompt) >= _LONG_PROMPT_BYTES else b""
        # A body that is long only because of its prompt is short once that is left out.
        own_bytes = len(body) - len(prompt) * max(call.sequences, 1)
        # Reading in parts skips the arrays that scores and a top-k need.
        if plain and own_bytes >= _LONG_BYTES:
            decoded = _decode_in_parts(call, spec, body, prompt)
        else:
            rest = long_reply.without_prompt(body, prompt) if prompt else body
            decoded = _decode_plain(call, rest) if plain else None
            load = json_arrays.load if rest is body else lambda _: json_arrays.load(rest)
        if decoded is not None:
            return decoded
    return _decode_whole(call, spec, body, load or json_arrays.load)


def reads_in_parts(call: UpstreamCall, spec: SampleSpec) -> bool:
    """Return whether a long reply takes about 0.5 ms for each MiB to read; otherwise it takes up to 40."""
    return call.protocol is not _GENERATE and _is_plain(call, spec) and json_arrays.simdjson is not None


def _is_plain(call: UpstreamCall, spec: SampleSpec) -> bool:
    return not (call.scores or spec.topk_sample_logprobs or spec.images)


def _decode_plain(call: UpstreamCall, body: Body) -> Decoded | None:
    """Decode a usual reply; None as in `_decode_in_parts`."""
    reply = short_reply.load(body)
    sequences = short_reply.sequences(reply, body, call.sequences, call.max_tokens) if reply is not None else None
    return Decoded(sequences, None, _cached_tokens(reply)) if sequences is not None else None


def _decode_in_parts(call: UpstreamCall, spec: SampleSpec, body: Body, prompt: bytes) -> Decoded | None:
    """Decode a long reply in parts; None if it is unusual or a fault, whose words need the whole."""
    reply = long_reply.load(body, call.sequences, prompt=prompt)
    decoded = _decode_whole(call, spec, body, lambda _: reply) if reply is not None else None
    return decoded if isinstance(decoded, Decoded) else None


def _decode_whole(
    call: UpstreamCall, spec: SampleSpec, body: Body, load: Callable[[Body], JsonValue]
) -> Decoded | Fault:
    try:
        return _decode(call, spec, _loaded(body, load))
    except _AbortedError as aborted:
        kind = FaultClass.ABORTED if aborted.tokens else FaultClass.NEVER_EXECUTED
        return Fault(kind, f"upstream's engine aborted the request after {aborted.tokens} tokens")
    except ReplyError as error:
        return Fault(error.kind, f"upstream answered 200 {error}")
    except json_arrays.UNREADABLE as error:
        return Fault(FaultClass.AMBIGUOUS, f"upstream answered 200 with what is no completion ({short(error)})")


def combine(spec: SampleSpec, decoded: Sequence[Decoded]) -> SampleResult:
    """Combine all replies of an attempt into one result, with as many sequences as were promised.

    A greedy sample has one sequence, n times. The cache hits are those of the sampling request, which comes last.
    """
    sequences = decoded[0].sequences
    if len(decoded) > 1:
        sequences = tuple(sequence for part in decoded for sequence in part.sequences)
    if len(sequences) == 1 < spec.num_samples:
        sequences *= spec.num_samples
    scores = next((part.scores for part in decoded if part.scores is not None), None)
    return SampleResult(sequences, scores, decoded[-1].cached_tokens)


def _loaded(body: Body, load: Callable[[Body], JsonValue]) -> JsonValue:
    try:
        reply = load(body)
        look_up = reply.get
        # Looking up an absent key costs as much as parsing a small reply, so look at the bytes first.
        may_hold_error = len(body) > _SMALL_BYTES or b"error" in body
        error_inside = look_up("error") if may_hold_error else None
    except json_arrays.UNREADABLE as error:
        raise ReplyError(f"with {_what_it_is(body)} ({short(error)})") from None
    if error_inside:
        raise ReplyError(f"with an error inside: {upstream_words(body)}")
    return reply


def _what_it_is(body: Body) -> str:
    start = body[:64].lstrip()
    if not start:
        return "an empty body"
    if start.startswith(b"<"):
        return "HTML instead of JSON"
    if b"NaN" in body or b"Infinity" in body:
        return "NaN or Infinity, which is no JSON"
    return "what is no JSON object, or was cut"


def _decode(call: UpstreamCall, spec: SampleSpec, reply: JsonValue) -> Decoded:
    generates = call.protocol is _GENERATE
    reader: _Reader = generate if generates else completions
    choices = _choices_in_order(reader, reply["choices"], max(call.sequences, 1))
    if spec.images:
        spec = generate.with_images_expanded(spec, reply)
    kept = choices if call.sequences else ()
    sequences = tuple(_sequence(reader, spec, choice, call.max_tokens) for choice in kept)
    scores = prompt_scores(spec, reader.prompt_rows(reply, choices[0])) if call.scores else None
    versions = map(generate.weight_versions, choices) if generates and sequences else ()
    mixed = tuple(of_choice for of_choice in versions if len(of_choice) > 1)
    return Decoded(sequences, scores, _cached_tokens(reply), mixed)


def _choices_in_order(reader: _Reader, choices: JsonValue, wanted: int) -> list[JsonValue]:
    """Return the choices by index. One aborted choice spoils all: they belong to one promise."""
    if (
        wanted == 1
        and len(choices) == 1
        and (only := choices[0]).get("finish_reason") != "abort"
        and only["index"] == 0
    ):
        return [only]
    if any(choice.get("finish_reason") == "abort" for choice in choices):
        raise _AbortedError(sum(reader.count_tokens(choice) for choice in choices))
    if len(choices) != wanted:
        raise ReplyError(f"with {len(choices)} choices where {wanted} were asked for")
    by_index = {choice["index"]: choice for choice in choices}
    if by_index.keys() != set(range(wanted)):
        raise ReplyError(f"with choices numbered {sorted(by_index)[:8]} where {wanted} were asked for")
    return [by_index[index] for index in range(wanted)]


def _sequence(reader: _Reader, spec: SampleSpec, choice: JsonValue, max_tokens: int) -> SequenceResult:
    finish_reason = choice.get("finish_reason")
    if finish_reason not in STOP_REASONS:
        raise ReplyError(f"with the finish_reason {finish_reason!r}")
    tokens, logprobs = reader.sampled(choice)
    if len(tokens) != len(logprobs):
        raise ReplyError(f"with {len(tokens)} token ids and {len(logprobs)} logprobs")
    if len(tokens) > max_tokens:
        raise WrongReply(f"with {len(tokens)} tokens where at most {max_tokens} were asked for")
    k = spec.topk_sample_logprobs
    topk = reader.sampled_topk(choice, k, len(tokens)) if k else None
    return SequenceResult(tokens.astype("<i4").tobytes(), packed(logprobs), STOP_REASONS[finish_reason], topk)


def _cached_tokens(reply: JsonValue) -> int:
    """Return the cached tokens. They are information that some servers leave out: a generation never fails for it."""
    try:
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    except json_arrays.UNREADABLE:
        return 0
    return cached if type(cached) is int and 0 <= cached <= _INT32_MAX else 0
