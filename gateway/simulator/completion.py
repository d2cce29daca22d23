"""A completion request as vLLM reads it, and the generation that answers it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gateway.simulator import tokens as oracle

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DEFAULT_MAX_TOKENS: Final = 16
_MAX_LOGPROBS: Final = 20
_MAX_STOP_STRINGS: Final = 4


class Refused(Exception):
    """An error reply in vLLM's form."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True)
class Ask:
    """One validated request. `prompt`: int32[P]. `logprobs`, `prompt_logprobs`: how many, None for none."""

    model: str
    prompt: NDArray[np.int32]
    max_tokens: int
    n: int = 1
    seed: int | None = None
    temperature: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """One generated sequence; logprobs are as reported at the request's temperature."""

    seed: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: str
    stop_reason: int | str | None
    scaled: bool = True  # by the temperature


def read_ask(document: Any, served: frozenset[str], max_model_len: int) -> Ask:
    """Raises `Refused` in the cases and words of a real vLLM."""
    if not isinstance(document, dict):
        raise Refused(400, "Input should be a valid dictionary", "Bad Request")
    model = document.get("model")
    if model not in served:
        raise Refused(404, f"The model `{model}` does not exist.", "NotFoundError", "model")
    prompt = _prompt(document.get("prompt", document.get("token_ids")), max_model_len)
    max_tokens = _number(document, "max_tokens", _DEFAULT_MAX_TOKENS)
    if max_tokens > max_model_len:
        raise Refused(400, f"max_tokens={max_tokens} cannot be greater than max_model_len={max_model_len}.")
    if max_tokens < 1:
        raise Refused(400, f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    return _checked(
        Ask(
            model=str(model),
            prompt=prompt,
            max_tokens=min(max_tokens, max_model_len - len(prompt)),
            n=_number(document, "n", 1),
            seed=document.get("seed"),
            temperature=float(_or_default(document.get("temperature"), 1.0)),
            logprobs=_optional(document.get("logprobs")),
            prompt_logprobs=_optional(document.get("prompt_logprobs")),
            stop=_stop(document.get("stop")),
            stop_token_ids=frozenset(document.get("stop_token_ids") or ()),
            ignore_eos=bool(document.get("ignore_eos")),
            return_token_ids=bool(document.get("return_token_ids")),
            tokens_as_ids=bool(document.get("return_tokens_as_token_ids")),
        )
    )


def _checked(ask: Ask) -> Ask:
    if ask.temperature == 0.0 and ask.n > 1:
        raise Refused(400, f"n must be 1 when using greedy sampling, got {ask.n}.")
    if ask.n < 1:
        raise Refused(400, f"n must be at least 1, got {ask.n}.")
    if not 0.0 <= ask.temperature <= 2.0:
        raise Refused(400, f"temperature must be in [0, 2], got {ask.temperature}.")
    if len(ask.stop) > _MAX_STOP_STRINGS:
        raise Refused(400, f"stop: at most {_MAX_STOP_STRINGS} strings, got {len(ask.stop)}.")
    for asked in (ask.logprobs, ask.prompt_logprobs):
        if asked is not None and asked > _MAX_LOGPROBS:
            raise Refused(
                400, f"Requested sample logprobs of {asked}, which is greater than max allowed: {_MAX_LOGPROBS}"
            )
    return ask


def _prompt(value: Any, max_model_len: int) -> NDArray[np.int32]:
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        raise Refused(400, "The prompt must be a non-empty list of token ids.", param="prompt")
    if min(value) < 0 or max(value) >= oracle.VOCAB:
        worst = min(value) if min(value) < 0 else max(value)
        raise Refused(400, f"Token id {worst} is out of vocabulary")
    if len(value) > max_model_len:
        raise Refused(
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, your request has "
            f"{len(value)} input tokens. Please reduce the length of the input messages.",
        )
    if len(value) == max_model_len:
        raise Refused(400, "max_tokens must be at least 1, got 0.", param="max_tokens")
    return np.array(value, np.int32)


def _number(document: dict[str, Any], name: str, default: int) -> int:
    value = _or_default(document.get(name), default)
    if type(value) is not int:
        raise Refused(400, f"{name} must be an integer.", param=name)
    return value


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _optional(value: Any) -> int | None:
    if value is None or value is False:
        return None
    return 1 if value is True else int(value)


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def generate(ask: Ask, fresh_seed: int, *, raw_logprobs: bool = False) -> list[Choice]:
    """All choices of a request. `fresh_seed`, below `tokens.UNSEEDED`, is used when the request has none."""
    seed = ask.seed if ask.seed is not None else fresh_seed
    seeds = [oracle.GREEDY_SEED] if ask.temperature == 0.0 else [seed + index for index in range(ask.n)]
    return [_generate_one(ask, one, raw_logprobs) for one in seeds]


def _generate_one(ask: Ask, seed: int, raw_logprobs: bool) -> Choice:
    drawn, logprobs = oracle.sampled(ask.model, ask.prompt, seed, ask.max_tokens)
    length, finish_reason, stop_reason = _end(ask, drawn)
    told = logprobs if raw_logprobs else oracle.reported(logprobs, ask.temperature)
    return Choice(seed, drawn[:length], told[:length], finish_reason, stop_reason, not raw_logprobs)


def _end(ask: Ask, drawn: NDArray[np.int32]) -> tuple[int, str, int | str | None]:
    """How many tokens are kept, finish_reason, stop_reason: the first stop counts, its token is kept."""
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
    """How many tokens complete the first `characters` of the text."""
    seen = 0
    for count, text in enumerate(texts, 1):
        seen += len(text)
        if seen >= characters:
            return count
    return len(texts)
