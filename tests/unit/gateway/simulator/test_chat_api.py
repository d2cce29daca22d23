"""Chat completions of the simulated vLLM: validated as by vLLM, and the stream has the content of the whole reply."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.simulator import chat_api, completion
from gateway.simulator import tokens as oracle
from gateway.simulator.ask import Refused, ServedModels

SERVED = ServedModels(("sim/tiny",), (), 1_000)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
PROMPT = list(b"system: Be brief.\nuser: Why?\n")


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "sim/tiny", "messages": MESSAGES, "max_completion_tokens": 4, "seed": 7, **more}


def test_the_whole_reply() -> None:
    ask = chat_api.read(asked(n=2, logprobs=True, return_token_ids=True), SERVED)
    reply = orjson.loads(chat_api.render(ask, completion.generate(ask, 0), "r", 5))
    assert (reply["id"], reply["object"], reply["created"]) == ("chatcmpl-r", "chat.completion", 5)
    for index, choice in enumerate(reply["choices"]):
        tokens, logprobs = oracle.sampled("sim/tiny", PROMPT, 7 + index, 4)
        assert choice["token_ids"] == tokens.tolist()
        assert choice["message"]["content"] == "".join(map(oracle.text_of, tokens.tolist()))
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == logprobs.tolist()
        assert choice["finish_reason"] == "length"
    assert reply["usage"]["prompt_tokens"] == len(PROMPT)
    assert reply["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("k", [0, 1, 2, 20])
def test_as_many_alternatives_as_were_asked_for(k: int) -> None:
    ask = chat_api.read(asked(logprobs=True, top_logprobs=k), SERVED)
    reply = orjson.loads(chat_api.render(ask, completion.generate(ask, 0), "r", 5))
    content = reply["choices"][0]["logprobs"]["content"]
    others, _ = oracle.alternatives("sim/tiny", PROMPT, 7, 4, max(k, 1))
    assert len(content) == 4
    for place, entry in enumerate(content):
        top = entry.pop("top_logprobs")
        assert len(top) == len({other["token"] for other in top}) == k
        assert top[:1] == [entry][:k]
        known = {entry["token"], *map(oracle.text_of, others[place].tolist())}
        assert {other["token"] for other in top} <= known


def test_a_stream_says_what_the_whole_reply_says() -> None:
    ask = chat_api.read(asked(n=2), SERVED)
    choices = completion.generate(ask, 0)
    whole = orjson.loads(chat_api.render(ask, choices, "r", 5))
    events = [
        orjson.loads(event.removeprefix(b"data: ")) for event in chat_api.events(ask, choices, "r", 5, usage=True)
    ]
    texts, ends = ["", ""], [None, None]
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        for part in event["choices"]:
            texts[part["index"]] += part["delta"].get("content", "")
            ends[part["index"]] = part["finish_reason"] or ends[part["index"]]
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert ends == ["length", "length"]
    assert events[-1]["usage"] == whole["usage"]
    assert all("usage" not in orjson.loads(event[6:]) for event in chat_api.events(ask, choices, "r", 5, usage=False))


def test_limits_by_both_names_and_by_the_context() -> None:
    assert chat_api.read(asked(), SERVED).max_tokens == 4
    old = asked(max_tokens=9)
    del old["max_completion_tokens"]
    assert chat_api.read(old, SERVED).max_tokens == 9
    del old["max_tokens"]
    assert chat_api.read(old, SERVED).max_tokens == SERVED.max_model_len - len(PROMPT)


@pytest.mark.parametrize("messages", [None, [], "Why?", [{"role": "user"}], ["Why?"]])
def test_what_are_no_messages(messages: Any) -> None:
    with pytest.raises(Refused) as refused:
        chat_api.read(asked(messages=messages), SERVED)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("document", "stream", "usage"),
    [
        (asked(), False, False),
        (asked(stream=True), True, False),
        (asked(stream=True, stream_options={"include_usage": True}), True, True),
        ([], False, False),
    ],
)
def test_whether_it_is_to_be_streamed(document: Any, stream: bool, usage: bool) -> None:
    assert (chat_api.wants_stream(document), chat_api.wants_usage(document)) == (stream, usage)
