"""Bodies that would hold up or fill a worker: each is refused, or its work is done in bounded slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from shared.config import MIB
from shared.core.errors import BadRequest
from shared.wire import json_arrays, openai, strict_json
from shared.wire.sdk import calls, prompt, sample
from tests.app_bench import API, opened
from tests.hostile.bodies import ASAMPLE, HOSTILE, sdk_chunks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator

    from tests.app_bench import AppBench

# The largest body of each path, as docs/interface.md states it.
SMALL: Final = (
    "/retrieve_future",
    "/client/config",
    "/client/dynamic_config",
    "/session_heartbeat",
    "/create_session",
    "/sessions/x/finish",
    "/create_sampling_session",
    "/join_sampling_session",
    "/cancel_future",
    "/weights_info",
)
LARGEST_BYTES: Final = dict.fromkeys(SMALL, 1 * MIB) | dict.fromkeys(("/retrieve_futures", "/telemetry"), 16 * MIB)


@pytest.fixture
async def bench() -> AsyncIterator[AppBench]:
    async with opened() as made:
        yield made


@pytest.mark.parametrize("path", LARGEST_BYTES)
async def test_a_path_takes_no_more_than_its_requests_need(bench: AppBench, path: str) -> None:
    limit_bytes = LARGEST_BYTES[path]
    refused = await bench.post(path, b" " * (limit_bytes + 1))
    assert (refused.status, str(limit_bytes) in refused.json["detail"]) == (413, True)
    assert (await bench.post(path, b" " * limit_bytes)).status != 413


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_requests_of_openai_take_16_mib(bench: AppBench, path: str) -> None:
    assert (await bench.request("POST", path, b" " * (16 * MIB + 1))).status == 413
    assert (await bench.request("POST", path, b" " * 16 * MIB)).status == 400


@pytest.mark.parametrize("path", [f"{API}/asample", "/v1/completions", "/v1/chat/completions", f"{API}/telemetry"])
async def test_no_path_takes_more_than_the_operator_allows(path: str) -> None:
    async with opened(max_body_bytes=2 * MIB) as bench:
        assert (await bench.request("POST", path, b" " * (2 * MIB + 1))).status == 413
        assert (await bench.request("POST", path, b" " * (2 * MIB))).status != 413


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
async def test_each_class_gets_its_reply(bench: AppBench, name: str) -> None:
    hostile = HOSTILE[name]
    answered = await bench.request("POST", hostile.path, hostile.make(hostile.size_bytes))
    assert (answered.status, hostile.words in answered.body.decode()) == (hostile.status, True), answered.body


# -- work is bounded before it is done: bytes that parsers are given are counted, not time ----------------------------

# Of one step. What is not a list of a known kind is given to two parsers, and is 1 MiB at most.
MOST_BYTES: Final = 2 * MIB + 2**16
# Two parsers of OpenAI's requests take all at once, which is why their bodies are 16 MiB at most.
MOST_OPENAI_BYTES: Final = 2 * 16 * MIB


class Work:
    """Counts the bytes that parsers are given."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.step_bytes = 0
        self.total_bytes = 0
        for module, name, method in (
            (prompt, "_chunks", "decode"),
            (prompt, "_any_list", "decode"),
            (sample, "_decoder", "decode"),
            (strict_json, "_keys", "raw_decode"),
            (calls, "_ids_decoder", "decode"),
            (openai, "_fields", "decode"),
            (openai, "_prompts", "decode"),
        ):
            patch.setattr(module, name, Counted(self, getattr(getattr(module, name), method)))
        patch.setattr(json_arrays, "count", Counted(self, json_arrays.count))

    def of_steps(self, steps: Generator[None, None, Any]) -> list[int]:
        """What each step is given; a refusal ends them."""
        each = []
        try:
            while True:
                self.step_bytes = 0
                next(steps)
                each.append(self.step_bytes)
        except (StopIteration, BadRequest):
            return [*each, self.step_bytes]


class Counted:
    def __init__(self, work: Work, parse: Callable[[Any], Any]) -> None:
        self._work = work
        self._parse = parse

    def __call__(self, data: Any) -> Any:
        self._work.step_bytes += len(data)
        self._work.total_bytes += len(data)
        return self._parse(data)

    decode = raw_decode = __call__


STEPS: Final[dict[str, Callable[[bytes], Generator[None, None, Any]]]] = {
    ASAMPLE: calls.sample_steps,
    f"{API}/retrieve_futures": calls.retrieve_futures_steps,
    "/v1/completions": openai.call_steps,
    "/v1/chat/completions": openai.call_steps,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, hostile in HOSTILE.items() if hostile.path in STEPS])
def test_no_step_is_given_more_than_some_milliseconds_of_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = HOSTILE[name]
    body = hostile.make(hostile.size_bytes)
    each = Work(monkeypatch).of_steps(STEPS[hostile.path](body))
    assert max(each) <= (MOST_OPENAI_BYTES if hostile.path.startswith("/v1/") else MOST_BYTES)
    # Blanks and quotes are read again, but nothing is read more often than some times.
    assert sum(each) <= 4 * len(body)


@pytest.mark.parametrize(
    "name", ["more chunks than any context", "chunks up to the limit", "token lists in no prompt", "many prompts"]
)
def test_what_is_too_much_is_refused_unparsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = HOSTILE[name]
    work = Work(monkeypatch)
    with pytest.raises(BadRequest):
        strict_json.at_once(STEPS[hostile.path](hostile.make(hostile.size_bytes)))
    # Some first lists are looked at to find out that there are many.
    assert work.total_bytes < 1000


def test_the_longest_prompt_of_the_sdk_is_read_once_in_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    body = sdk_chunks(13 * MIB)
    work = Work(monkeypatch)
    each = work.of_steps(calls.sample_steps(body))
    assert len(each) > 100
    assert work.total_bytes < 1.5 * len(body)


async def test_chunks_of_one_token_each_are_a_prompt(bench: AppBench) -> None:
    body = sdk_chunks(2**16)
    call = calls.decode_sample(body)
    count = body.count(b"151643")
    assert (call.spec.prompt, call.spec.prompt_tokens) == (b",".join([b"151643"] * count), count)


async def test_many_acknowledgements_are_taken_in_steps(bench: AppBench) -> None:
    hostile = HOSTILE["99,000 acknowledgements"]
    taken: list[int] = []
    acknowledged = bench.expiry.acknowledged
    bench.expiry.acknowledged = lambda keys: taken.append(len(keys)) or acknowledged(keys)  # type: ignore[method-assign,func-returns-value]
    assert (await bench.request("POST", hostile.path, hostile.make(hostile.size_bytes))).status == 200
    assert (max(taken), sum(taken)) == (1000, 98_999)
