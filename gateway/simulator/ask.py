"""Read a completion request as vLLM does, with vLLM's refusals and messages. Pure."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

from gateway.simulator import tokens as oracle

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from types import ModuleType

    from numpy.typing import NDArray

simdjson: ModuleType | None
try:
    import simdjson
except ImportError:  # CPython without a wheel
    simdjson = None

# vLLM's defaults and limits.
_DEFAULT_MAX_TOKENS: Final = 16
_MAX_LOGPROBS: Final = 20
_MAX_STOP_STRINGS: Final = 4
_MAX_N: Final = 16_384
# A longer body is read without an object per token, which would be nine tenths of the request's cost.
_LONG_BYTES: Final = 4096
_PROMPTS: Final = ("prompt", "token_ids")
# Replaces the prompt while the rest is read; no document contains it by chance.
_TAKEN_OUT: Final = os.urandom(16).hex()


class Refused(Exception):
    """An error reply in vLLM's form."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True)
class Ask:
    """One validated request. `prompt` is int32[P]; `logprobs` and `prompt_logprobs` are counts, None for no logprobs.

    `image_spans` holds the offset and length of each image in `prompt`.
    """

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
    return_prompt: bool = False
    image_spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The models and adapters that a request may name, and the context length."""

    models: Sequence[str]
    adapters: Collection[str]
    max_model_len: int


def parse(body: bytes) -> Any:
    """Parse a JSON body; a long prompt of integers becomes an int64[P]. Raises `Refused`.

    Without pysimdjson a long prompt stays a list.
    """
    long = _with_long_prompt(body, simdjson) if simdjson is not None and len(body) >= _LONG_BYTES else None
    return long if long is not None else _parse(body)


def _with_long_prompt(body: bytes, simdjson: ModuleType) -> dict[str, Any] | None:
    """Parse a body whose prompt is one long array of integers; return None for any other body."""
    for name in _PROMPTS:
        opening = b'"%b":[' % name.encode()
        # Inside a JSON string the quotes of `opening` would be escaped, so this is a real key.
        before, found, rest = body.partition(opening)
        inside, closed, after = rest.partition(b"]")
        if not found or not closed or opening in after or b"[" in inside:
            continue
        try:
            document = orjson.loads(b'%b%b"%b"]%b' % (before, opening, _TAKEN_OUT.encode(), after))
            prompt = simdjson.Parser().parse(b"[%b]" % inside)
            ids = np.frombuffer(prompt.as_buffer(of_type="i"), np.int64) if isinstance(prompt, simdjson.Array) else ()
        except (ValueError, TypeError, RuntimeError):
            return None
        # Refuse a match that was nested, or that a later key of the same name overrides.
        if isinstance(document, dict) and document.get(name) == [_TAKEN_OUT] and len(ids):
            return {**document, name: ids}
    return None


def _parse(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:
        # vLLM reports the message and position of the standard library, which also accepts NaN.
        return json.loads(body)
    except UnicodeDecodeError:
        raise Refused(400, "There was an error parsing the body", "Bad Request") from None
    except json.JSONDecodeError as error:
        loc = f"body.{error.pos}"
        context = f"'input': '<dict of 0 items>', 'ctx': {{'error': {error.msg!r}}}"
        raise _invalid(loc, f"'type': 'json_invalid', 'loc': '{loc}', 'msg': 'JSON decode error', {context}") from None


def read_ask(document: Any, served: ServedModels, max_stop_strings: int | None = _MAX_STOP_STRINGS) -> Ask:
    """Validate a parsed request. Raises `Refused`. `max_stop_strings`: None for no limit."""
    if not isinstance(document, dict):
        raise _invalid("body", "'type': 'dict_type', 'loc': 'body', 'msg': 'Input should be a valid dictionary'")
    model = _model(document.get("model"), served)
    prompt = _prompt(document.get("prompt"), served.max_model_len)
    temperature = _temperature(document)
    return Ask(
        model=model,
        prompt=prompt,
        max_tokens=min(_max_tokens(document, served.max_model_len), served.max_model_len - len(prompt)),
        n=_n(document, greedy=temperature == 0.0),
        seed=_optional_int(document, "seed"),
        temperature=temperature,
        logprobs=_logprobs(document, "logprobs", "sample"),
        prompt_logprobs=_logprobs(document, "prompt_logprobs", "prompt"),
        stop=_stop(document.get("stop"), max_stop_strings),
        stop_token_ids=_stop_token_ids(document.get("stop_token_ids")),
        ignore_eos=bool(document.get("ignore_eos")),
        return_token_ids=bool(document.get("return_token_ids")),
        tokens_as_ids=bool(document.get("return_tokens_as_token_ids")),
    )


def _model(name: Any, served: ServedModels) -> str:
    if isinstance(name, str) and (name in served.models or name in served.adapters):
        return name
    known = ", ".join(served.models)
    raise Refused(404, f"The model `{name}` does not exist. Valid aliases: {known}.", "NotFoundError", "model")


def _prompt(value: Any, max_model_len: int) -> NDArray[np.int32]:
    """Return the prompt's tokens. `value` is an array of `parse`, a list or a text."""
    if isinstance(value, str):
        value = oracle.tokens_of(value)
    if not isinstance(value, np.ndarray) and not _all_integers(value):
        raise _invalid(
            "body.prompt", "'type': 'list_type', 'loc': 'body.prompt', 'msg': 'Input should be a valid list'"
        )
    if not len(value):
        raise Refused(400, "You must pass at least one prompt")
    ids = value if isinstance(value, np.ndarray) else _exact(value)
    if (lowest := ids.min()) < 0:
        loc = f"body.prompt.{int(ids.argmin())}"
        message = f"'msg': 'Input should be greater than or equal to 0', 'input': '{lowest}', 'ctx': {{'ge': 0}}"
        raise _invalid(loc, f"'type': 'greater_than_equal', 'loc': '{loc}', {message}")
    if (highest := ids.max()) >= oracle.VOCAB:
        raise Refused(400, f"Token id {highest} is out of vocabulary")
    _check_length(len(ids), max_model_len)
    return ids.astype(np.int32)


def _exact(value: list[int]) -> NDArray[Any]:
    """Return an array of exact integers; numpy would turn some that are too large for it into floats."""
    try:
        return np.array(value, np.int64)
    except OverflowError:
        return np.array(value, object)


def _check_length(prompt_tokens: int, max_model_len: int) -> None:
    if prompt_tokens == max_model_len:
        raise _out_of_range("max_tokens must be at least 1, got 0.", "max_tokens", 0)
    if prompt_tokens > max_model_len:
        raise _out_of_range(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
            f"{max_model_len + 1} input tokens, which exceeds this limit even without any output tokens. Please reduce "
            "the length of the input prompt.",
            "input_tokens",
            max_model_len + 1,
        )


def _max_tokens(document: dict[str, Any], max_model_len: int) -> int:
    asked = _optional_int(document, "max_tokens")
    if asked is None:
        return _DEFAULT_MAX_TOKENS
    if asked > max_model_len:
        message = f"max_tokens={asked} cannot be greater than max_model_len={max_model_len}."
        raise _out_of_range(f"{message} Please request fewer output tokens.", "max_tokens", asked)
    if asked < 1:
        raise _out_of_range(f"max_tokens must be at least 1, got {asked}.", "max_tokens", asked)
    return asked


def _n(document: dict[str, Any], *, greedy: bool) -> int:
    asked = _optional_int(document, "n")
    n = 1 if asked is None else asked
    if n < 1:
        raise Refused(400, f"n must be at least 1, got {n}.")
    if n > _MAX_N:
        raise Refused(400, f"n must be at most {_MAX_N}, got {n}.")
    if greedy and n > 1:
        raise Refused(400, f"n must be 1 when using greedy sampling, got {n}.")
    return n


def _temperature(document: dict[str, Any]) -> float:
    """Return the temperature. `top_p` is validated here too, and otherwise ignored."""
    top_p = _number(document, "top_p", 1.0)
    if not 0.0 < top_p <= 1.0:
        raise _out_of_range(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    temperature = _number(document, "temperature", 1.0)
    if not 0.0 <= temperature <= 2.0:
        raise _out_of_range(f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature)
    return temperature


def _logprobs(document: dict[str, Any], name: str, what: str) -> int | None:
    value = document.get(name)
    if isinstance(value, bool):
        return 1 if value else None
    asked = _optional_int(document, name)
    if asked is not None and asked > _MAX_LOGPROBS:
        message = f"Requested {what} logprobs of {asked}, which is greater than max allowed: {_MAX_LOGPROBS}"
        raise _out_of_range(message, name, asked)
    if asked is not None and asked < 0:
        raise _out_of_range(f"{name} must be non-negative, got {asked}.", name, asked)
    return asked


def _stop(value: Any, most: int | None) -> tuple[str, ...]:
    if value is None or isinstance(value, str):
        return (value,) if value else ()
    if not isinstance(value, list) or any(type(one) is not str or not one for one in value):
        raise _invalid(
            "body.stop", "'type': 'string_type', 'loc': 'body.stop', 'msg': 'Input should be a valid string'"
        )
    if most is not None and len(value) > most:
        message = f"List should have at most {most} items after validation, not {len(value)}"
        raise _invalid("body.stop", f"'type': 'too_long', 'loc': 'body.stop', 'msg': '{message}'")
    return tuple(value)


def _stop_token_ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    if not _all_integers(value):
        loc = "body.stop_token_ids"
        raise _invalid(loc, f"'type': 'list_type', 'loc': '{loc}', 'msg': 'Input should be a valid list'")
    return frozenset(value)


def _all_integers(value: Any) -> bool:
    # A set of types costs a quarter of a test per item, which matters for long prompts.
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _optional_int(document: dict[str, Any], name: str) -> int | None:
    value = document.get(name)
    if value is not None and type(value) is not int:
        raise _invalid(
            f"body.{name}", f"'type': 'int_type', 'loc': 'body.{name}', 'msg': 'Input should be a valid integer'"
        )
    return value


def _number(document: dict[str, Any], name: str, default: float) -> float:
    value = document.get(name)
    if value is None:
        return default
    if type(value) not in (int, float):
        raise _invalid(
            f"body.{name}", f"'type': 'float_type', 'loc': 'body.{name}', 'msg': 'Input should be a valid number'"
        )
    return float(value)


def _invalid(param: str, what: str) -> Refused:
    """Refuse a value of the wrong type, as the web framework in front of vLLM does."""
    return Refused(400, f"1 validation error:\n  {{{what}}}", "Bad Request", param)


def _out_of_range(message: str, param: str, value: float) -> Refused:
    """Refuse a value that is out of range, as vLLM itself does."""
    return Refused(400, f"{message} (parameter={param}, value={value})", param=param)
