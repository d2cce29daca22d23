"""What `gateway check` and the supervisor ask an upstream: its models, and whether its logprobs use the temperature."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson

from shared.core.logprobs_check import AT_HALF, AT_ONE, PROBE_REQUEST_ID, logprobs_scale
from shared.core.upstream_protocol import PROBE_BODY, UpstreamProtocol
from shared.core.upstream_text import shown_words
from shared.system_error import system_reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shared.config import ModelName

_TIMEOUT_S: Final = 20.0
# Ids that every vocabulary has.
_PROMPT: Final = (1, 2, 3)
# With top logprobs the first answer is enough. Without them, two answers must happen to share a token.
_SEEDS: Final = (1, 2, 3, 4)
_TOP: Final = 5


class ProbeError(Exception):
    """The upstream did not answer as vLLM does; the text says in what way."""


class NoAnswer(ProbeError):
    """The upstream did not answer at all."""


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model that an upstream lists.

    `max_model_len` is None if the upstream does not report it; `parent` names the base model of an adapter.
    """

    name: str
    max_model_len: int | None
    parent: str | None


def session(api_key: str | None) -> aiohttp.ClientSession:
    """Return an HTTP session for the functions below; the caller closes it (`async with`)."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))


async def offered_models(http: aiohttp.ClientSession, upstream: str) -> list[OfferedModel]:
    """Return the models of `/v1/models`. Raises `ProbeError`."""
    body = await _exchange(http, "GET", upstream + "/v1/models")
    try:
        return [OfferedModel(m["id"], m.get("max_model_len"), m.get("parent")) for m in body["data"]]
    except (KeyError, TypeError, AttributeError):
        raise ProbeError("/v1/models did not answer a list of models") from None


def to_probe(offered: Sequence[OfferedModel], wanted: Sequence[ModelName]) -> list[str]:
    """Return the models to probe: those of `--model` that the upstream lists, or all its base models."""
    if wanted:
        names = {model.name for model in offered}
        return [model.upstream_name for model in wanted if model.upstream_name in names]
    return [model.name for model in offered if model.parent is None]


async def probe_scaling(http: aiohttp.ClientSession, upstream: str, model: str) -> bool | None:
    """Return whether sampled logprobs use the temperature, or None if that stays unknown. Raises `ProbeError`.

    Samples one token per seed and temperature until the answer is known.
    """
    at_one: dict[int, float] = {}
    at_half: dict[int, float] = {}
    for seed in _SEEDS:
        at_one.update(await _first_token(http, upstream, model, AT_ONE, seed))
        at_half.update(await _first_token(http, upstream, model, AT_HALF, seed))
        if (scales := logprobs_scale(at_one, at_half)) is not None:
            return scales
    return None


async def _first_token(
    http: aiohttp.ClientSession, upstream: str, model: str, temperature: float, seed: int
) -> dict[int, float]:
    request = {
        "model": model,
        "prompt": _PROMPT,
        "max_tokens": 1,
        "temperature": temperature,
        "seed": seed,
        "logprobs": _TOP,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    return first_logprobs(await _exchange(http, "POST", upstream + "/v1/completions", request))


def first_logprobs(body: Mapping[str, Any]) -> dict[int, float]:
    """Return token ids and logprobs of the first sampled position of a completion. Raises `ProbeError`."""
    try:
        choice = body["choices"][0]
        logprobs = choice["logprobs"]
        found = {int(choice["token_ids"][0]): float(logprobs["token_logprobs"][0])}
        for name, value in ((logprobs.get("top_logprobs") or [None])[0] or {}).items():
            found[int(name.removeprefix("token_id:"))] = float(value)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise ProbeError("/v1/completions answered without token ids and logprobs, unlike vLLM") from None
    return found


async def generation_status(http: aiohttp.ClientSession, upstream: str) -> int:
    """Return the status for an empty generation, which `upstream_protocol.has_generate` reads. Raises `NoAnswer`."""
    headers = {"Content-Type": "application/json", "X-Request-Id": PROBE_REQUEST_ID}
    url = upstream + UpstreamProtocol.GENERATE.path
    with _no_answer():
        async with http.post(url, data=PROBE_BODY, headers=headers, allow_redirects=False) as reply:
            return reply.status


async def training_status(http: aiohttp.ClientSession, url: str, api_key: str | None) -> int:
    """Return the status of a training server for `get_server_capabilities`. Raises `NoAnswer`."""
    headers = {"X-API-Key": api_key} if api_key else {}
    with _no_answer():
        async with http.get(f"{url}/api/v1/get_server_capabilities", headers=headers, allow_redirects=False) as reply:
            return reply.status


@contextmanager
def _no_answer() -> Iterator[None]:
    """Turn whatever keeps a server from answering into `NoAnswer`."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        raise NoAnswer(f"cannot connect: {system_reason(error.os_error)}") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise NoAnswer(str(error) or "no answer in time") from None


async def _exchange(http: aiohttp.ClientSession, method: str, url: str, body: object = None) -> dict[str, Any]:
    data = orjson.dumps(body) if body is not None else None
    headers = {"Content-Type": "application/json", "X-Request-Id": PROBE_REQUEST_ID} if data else {}
    with _no_answer():
        async with http.request(method, url, data=data, headers=headers, allow_redirects=False) as reply:
            raw, code = await reply.read(), reply.status
    if code != 200:
        raise ProbeError(f"{method} {url} answered {code}: {shown_words(raw)}")
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise ProbeError(f"{method} {url} did not answer JSON") from None
    if not isinstance(answer, dict):
        raise ProbeError(f"{method} {url} did not answer a JSON object")
    return answer
