"""The simulator refuses the requests that a real vLLM refused, with the same messages."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from gateway.simulator import ask as module
from gateway.simulator.ask import Ask, Refused, ServedModels, parse, read_ask
from tests.vllm_recordings import recording

# As the recorded server was started.
SERVED = ServedModels(("tiny",), ("a2",), 4096)
REQUEST: dict[str, Any] = {"model": "tiny", "prompt": [10, 11, 12]}


def ask_for(**changes: Any) -> Ask:
    return read_ask({**REQUEST, **changes}, SERVED)


def refusal(**changes: Any) -> dict[str, Any]:
    with pytest.raises(Refused) as caught:
        ask_for(**changes)
    error: dict[str, Any] = caught.value.body["error"]
    assert error["code"] == caught.value.status
    return error


@pytest.mark.parametrize(
    "name",
    [
        "21_temp0_n4",
        "24_gen_unknown_adapter",
        "30_logprobs_21",
        "30_max_tokens_over_len",
        "30_n0",
        "30_prompt_empty_list",
        "30_prompt_eq_maxlen",
        "30_prompt_too_long",
        "30_temp_big",
        "30_tok_oov",
        "30_top_p0",
        "30_unknown_model",
    ],
)
def test_the_words_of_a_real_refusal(name: str) -> None:
    """D11, D12"""
    recorded = recording(name)
    with pytest.raises(Refused) as caught:
        read_ask(recorded.asked, SERVED)
    assert caught.value.status == recorded.status
    assert caught.value.body == json.loads(recorded.body)


@pytest.mark.parametrize("name", ["22_stop_17", "30_tok_neg"])
def test_the_kind_of_a_real_refusal(name: str) -> None:
    """vLLM lists every alternative that did not fit; the simulator names the first."""
    error = json.loads(recording(name).body)["error"]
    with pytest.raises(Refused) as caught:
        read_ask(recording(name).asked, SERVED)
    told = caught.value.body["error"]
    assert [told[key] for key in ("type", "param", "code")] == [error[key] for key in ("type", "param", "code")]


def test_malformed_json_in_the_words_of_a_real_refusal() -> None:
    with pytest.raises(Refused) as caught:
        parse(b'{"model":"tiny","prompt":[1,2')
    assert caught.value.body == json.loads(recording("30_malformed").body)


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(Refused):
        parse(b'{"model":"\xff"}')


@pytest.mark.parametrize(
    ("asked", "max_tokens"),
    [({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 5}, 5), ({"max_tokens": 4096}, 4093)],
)
def test_max_tokens_is_16_when_missing_and_clamped_to_the_context(asked: dict[str, Any], max_tokens: int) -> None:
    """D11"""
    assert ask_for(**asked).max_tokens == max_tokens


def test_the_longest_prompt_leaves_one_token() -> None:
    """D11"""
    assert ask_for(prompt=[1] * 4095, max_tokens=200).max_tokens == 1


@pytest.mark.parametrize(
    ("value", "logprobs"), [(None, None), (False, None), (True, 1), (0, 0), (1, 1), (20, 20)], ids=repr
)
def test_logprobs_may_be_a_number_or_a_truth(value: Any, logprobs: int | None) -> None:
    assert ask_for(logprobs=value).logprobs == logprobs
    assert ask_for(prompt_logprobs=value).prompt_logprobs == logprobs


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": ""}, None),
        ({"prompt": ["text"]}, "body.prompt"),
        ({"prompt": [1.5]}, "body.prompt"),
        ({"prompt": [True]}, "body.prompt"),
        ({"prompt": [[1], [2]]}, "body.prompt"),
        ({"prompt": None}, "body.prompt"),
        ({"n": "2"}, "body.n"),
        ({"n": 20_000}, None),
        ({"seed": 1.5}, "body.seed"),
        ({"seed": "7"}, "body.seed"),
        ({"temperature": "hot"}, "body.temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"stop": [1]}, "body.stop"),
        ({"stop_token_ids": 5}, "body.stop_token_ids"),
    ],
    ids=repr,
)
def test_wrong_types_and_values_are_refused_by_name(changes: dict[str, Any], param: str | None) -> None:
    assert refusal(**changes)["param"] == param


@pytest.mark.parametrize("text", ["hello", "é 1.50"])
def test_a_text_is_a_token_for_each_byte(text: str) -> None:
    assert ask_for(prompt=text).prompt.tolist() == list(text.encode())


def test_half_a_surrogate_pair_is_a_token_too() -> None:
    body = parse(b'{"model": "tiny", "prompt": "a\\ud800"}')
    assert read_ask(body, SERVED).prompt.tolist() == list(b"a?")


def test_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(Refused):
        read_ask([1], SERVED)


def test_an_adapter_is_served_like_a_model() -> None:
    assert ask_for(model="a2").model == "a2"


def test_a_whole_request() -> None:
    ask = ask_for(n=2, seed=7, temperature=0.5, stop="x", stop_token_ids=[3], ignore_eos=True, return_token_ids=True)
    assert (ask.n, ask.seed, ask.temperature) == (2, 7, 0.5)
    assert (ask.stop, ask.stop_token_ids) == (("x",), frozenset({3}))
    assert ask.ignore_eos and ask.return_token_ids and not ask.tokens_as_ids
    assert ask.prompt.tolist() == [10, 11, 12]


@pytest.mark.parametrize(
    ("prompt", "told"),
    [([1, 2**63], f"{2**63} is out"), ([-1, 2**63], "'input': '-1'"), ([-(2**70)], f"'input': '-{2**70}'")],
)
def test_numbers_are_told_as_they_came(prompt: list[int], told: str) -> None:
    assert told in refusal(prompt=prompt)["message"]


LONG = [number % 32_000 for number in range(3_000)]


@pytest.fixture(params=["simdjson", "plain"])
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run with pysimdjson, which reads a long prompt at once, and without it."""
    if request.param == "plain":
        monkeypatch.setattr(module, "simdjson", None)
    elif module.simdjson is None:
        pytest.skip("there is no pysimdjson")
    return module.simdjson is not None


@pytest.mark.parametrize("name", ["prompt", "token_ids"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_long_prompt_is_read_as_a_short_one(name: str, separators: tuple[str, str], quick: bool) -> None:
    document = {"model": "tiny", name: LONG, "max_tokens": 7, "stop": ["x", '"prompt":[1]']}
    read = parse(json.dumps(document, separators=separators).encode())
    assert {**read, name: list(read[name])} == document
    assert isinstance(read[name], np.ndarray) == (quick and separators == (",", ":"))


@pytest.mark.parametrize(
    "prompt",
    [
        [*LONG, True],
        [*LONG, 1.5],
        [*LONG, 2**63],
        [*LONG, 2**70],
        [*LONG, None],
        [*LONG, "1"],
        [LONG, LONG],
        [*LONG, [1]],
        " ".join(map(str, LONG)),
    ],
    ids=["bool", "float", "64 bits", "70 bits", "null", "text", "lists", "a list", "words"],
)
@pytest.mark.usefixtures("quick")
def test_a_long_prompt_of_anything_else_stays_what_it_is(prompt: Any) -> None:
    document = {"model": "tiny", "prompt": prompt}
    assert parse(json.dumps(document, separators=(",", ":")).encode()) == document


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":{"prompt":[%b]},"prompt":[]}',
        b'{"prompt":[],"prompt":[%b]}',
        b'{"prompt":[%b],"prompt":[]}',
        b'[{"prompt":[%b]}]',
        b'{"prompt":[%b],"prompt": []}',
        b'{"prompt":[%b],"\\u0070rompt":[]}',
        b'{"a":{"token_ids":[%b]},"token_ids": []}',
    ],
)
@pytest.mark.usefixtures("quick")
def test_where_a_long_prompt_stands_matters(body: bytes) -> None:
    body %= ",".join(map(str, LONG)).encode()
    assert parse(body) == json.loads(body)


@pytest.mark.parametrize("inside", ["1,,", "1,", ",1", "01", "1]2", '"'])
@pytest.mark.usefixtures("quick")
def test_a_long_prompt_that_is_no_json_is_refused(inside: str) -> None:
    body = json.dumps({"prompt": LONG}).replace("]", f",{inside}]").encode()
    with pytest.raises(Refused) as caught:
        parse(body.replace(b" ", b""))
    assert caught.value.status == 400


@pytest.mark.parametrize("wrong", [-5, 32_000])
def test_a_long_prompt_is_refused_in_the_words_for_a_short_one(wrong: int, quick: bool) -> None:
    told = [refusal(prompt=[*LONG[:place], wrong]) for place in (3, 2_000)]
    body = json.dumps({**REQUEST, "prompt": [*LONG[:2_000], wrong]}, separators=(",", ":")).encode()
    read = parse(body)
    assert isinstance(read["prompt"], np.ndarray) == quick
    with pytest.raises(Refused) as caught:
        read_ask(read, SERVED)
    assert caught.value.body["error"] == told[1]
    assert told[1] == json.loads(json.dumps(told[0]).replace("prompt.3", "prompt.2000"))
