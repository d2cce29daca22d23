from __future__ import annotations

import base64
import json
from contextlib import suppress
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.errors import BadRequest
from shared.core.model import Image, SamplingParams
from shared.wire.sdk.calls import SampleCall, decode_sample
from shared.wire.strict_json import MAX_VALUES

# What SDK 0.38.0 sends.
SDK_BODY = (
    b'{"num_samples":2,"prompt":{"chunks":[{"tokens":[1,2,3,4,5],"type":"encoded_text"}]},'
    b'"sampling_params":{"max_tokens":3,"stop":["\\n"],"temperature":0.7,"top_k":-1,"top_p":1.0},'
    b'"sampling_session_id":"ss","seq_id":0,"prompt_logprobs":true,"topk_prompt_logprobs":2,'
    b'"topk_sample_logprobs":0,"prompt_alt_tokens_k":0,"record_stability_info":false,"type":"sample"}'
)


def body(params: dict[str, Any] | None = None, **fields: Any) -> bytes:
    document = {
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": params or {},
        "sampling_session_id": "ss",
        "seq_id": 1,
    }
    return json.dumps(document | fields).encode()


def prompt(*chunks: dict[str, Any]) -> dict[str, Any]:
    return {"chunks": list(chunks)}


def refusal(data: bytes) -> str:
    with pytest.raises(BadRequest) as caught:
        decode_sample(data)
    text = str(caught.value)
    assert text and "\n" not in text
    return text


def params_of(**params: Any) -> SamplingParams:
    return decode_sample(body(params)).spec.params


def test_what_the_sdk_sends() -> None:
    call = decode_sample(SDK_BODY)
    assert (call.sampling_session_id, call.seq_id, call.base_model, call.model_path) == ("ss", 0, None, None)
    spec = call.spec
    assert (spec.prompt, spec.prompt_tokens, spec.num_samples) == (b"1,2,3,4,5", 5, 2)
    assert spec.params == SamplingParams(max_tokens=3, stop=("\n",), temperature=0.7)
    assert (spec.prompt_logprobs, spec.topk_prompt_logprobs, spec.topk_sample_logprobs) == (True, 2, 0)
    assert len(spec.digest) == 16


def test_what_sdk_0_16_1_sends() -> None:
    call = decode_sample(
        b'{"prompt":{"chunks":[{"tokens":[1,2]}]},"sampling_params":{"max_tokens":3},"sampling_session_id":"s","seq_id":7}'
    )
    assert call.spec.prompt == b"1,2"
    assert call.spec.num_samples == 1
    assert call.spec.params == SamplingParams(max_tokens=3)


def test_cut_at_every_byte() -> None:
    for cut in range(len(SDK_BODY)):
        refusal(SDK_BODY[:cut])


@pytest.mark.parametrize("tail", [b"x", b"{}", b",", b"\0"])
def test_trailing_bytes(tail: bytes) -> None:
    refusal(SDK_BODY + tail)


# -- the prompt -------------------------------------------------------------------------------------------------------


def test_chunks_are_joined_and_an_empty_one_is_nothing() -> None:
    """A17"""
    chunks = prompt({"tokens": [1, 2]}, {"tokens": []}, {"tokens": [3], "type": "encoded_text"})
    spec = decode_sample(body(prompt=chunks)).spec
    assert (spec.prompt, spec.prompt_tokens) == (b"1,2,3", 3)


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=2), min_size=65, max_size=90),
    st.sampled_from([(",", ":"), (", ", ": ")]),
    st.sampled_from([{}, {"type": "encoded_text"}, {"later": "x"}, {"later": {"a": [1]}}]),
)
def test_many_chunks_are_one_prompt(lists: list[list[int]], separators: tuple[str, str], more: dict[str, Any]) -> None:
    tokens = [token for each in lists for token in each] + [7]
    chunks = [{"tokens": each} for each in lists] + [{"tokens": [7], **more}]
    document = json.loads(body(prompt=prompt({"tokens": tokens})))
    whole = decode_sample(json.dumps(document).encode())
    parts = json.dumps(document | {"prompt": prompt(*chunks)}, separators=separators).encode()
    assert decode_sample(parts) == whole


@pytest.mark.parametrize("bad", [{"tokens": [-1]}, {"tokens": ["1"]}, {"tokens": 5}, {"type": "hologram"}, {}])
def test_a_bad_one_of_many_chunks_is_named_by_its_place(bad: dict[str, Any]) -> None:
    chunks = [{"tokens": [1]}] * 5000 + [bad]
    assert "prompt chunk 5000 " in refusal(body(prompt=prompt(*chunks)))


@pytest.mark.parametrize("mark", ["@chunks", "@tokens 0", "@tokens x", "@data 0"])
@pytest.mark.parametrize("many", [1, 100])
def test_a_text_of_our_own_is_not_taken_for_what_was_taken_out(mark: str, many: int) -> None:
    chunks = [{"tokens": [1]}] * many
    with suppress(BadRequest):
        assert decode_sample(body(prompt=prompt(*chunks), later=mark)).spec.prompt_tokens == many
    for field in ("type", "tokens", "data"):
        refusal(body(prompt=prompt(*chunks, {field: mark})))
        refusal(body(prompt=prompt({"tokens": [1], field: mark}, *chunks)))


@pytest.mark.parametrize("chunks", [prompt(), prompt({"tokens": []}), prompt({"tokens": []}, {"tokens": []})])
def test_empty_prompt_is_one_clear_refusal(chunks: dict[str, Any]) -> None:
    """A17"""
    assert refusal(body(prompt=chunks)) == "the prompt is empty: it needs at least one token"


@pytest.mark.parametrize(
    "tokens",
    [
        *("[-1]", "[1.0]", "[1e3]", "[true]", "[null]", '["1"]', "[[1]]", "[[1],[2]]", "[{}]", '[{"a":1}]', '["]"]'),
        *("[2147483648]", "[18446744073709551616]", "null", "1", '"1,2"', "{}"),
    ],
)
def test_tokens_are_a_flat_list_of_ids(tokens: str) -> None:
    """D2"""
    data = f'{{"prompt":{{"chunks":[{{"tokens":{tokens}}}]}},"sampling_session_id":"s","seq_id":1}}'.encode()
    assert "tokens of prompt chunk 0" in refusal(data)


@pytest.mark.parametrize("tokens", ["[01]", "[1,]", "[1 2]", "[+1]", "[NaN]", "[0x1]", "[1e400]", "[1", "[,]"])
def test_tokens_are_json(tokens: str) -> None:
    refusal(f'{{"prompt":{{"chunks":[{{"tokens":{tokens}}}]}},"sampling_session_id":"s","seq_id":1}}'.encode())


@pytest.mark.parametrize("key", ["\\u0074okens", "tok\\u0065ns"])
def test_a_key_spelled_with_escapes_is_the_same_key(key: str) -> None:
    """Its list is not taken out of the body with the others, and must not be taken for a place among them."""
    chunks = f'[{{"tokens":[5,6]}},{{"{key}":[0]}},{{"tokens":[8]}}]'
    data = f'{{"prompt":{{"chunks":{chunks}}},"sampling_session_id":"s","seq_id":1}}'.encode()
    assert decode_sample(data).spec.prompt == b"5,6,0,8"


@pytest.mark.parametrize("blanks", ["[1, 2]", "[ 1,2 ]", "[1 ,2]", "[1,\n2]", "[1,  2]"])
def test_blanks_are_no_part_of_the_prompt(blanks: str) -> None:
    data = f'{{"prompt":{{"chunks":[{{"tokens": {blanks}}}]}},"sampling_session_id":"s","seq_id":1}}'.encode()
    assert decode_sample(data).spec.prompt == b"1,2"


def test_refusals_quote_no_tokens() -> None:
    assert "424242" not in refusal(body(prompt=prompt({"tokens": [424242, -1]})))


@pytest.mark.parametrize(
    ("chunk", "kind"),
    [
        ({"type": "image_asset_pointer", "location": "http://x", "format": "png"}, "image_asset_pointer"),
        ({"location": "http://x", "format": "png"}, "image_asset_pointer"),
        ({"type": "dmel", "dmel": "aGk="}, "dmel"),
        ({"dmel": "aGk="}, "dmel"),
        ({"type": "hologram"}, "hologram"),
    ],
)
def test_chunks_that_are_no_tokens_are_named(chunk: dict[str, Any], kind: str) -> None:
    message = refusal(body(prompt=prompt({"tokens": [1]}, chunk)))
    assert f"prompt chunk 1 is of type {kind!r}: " in message
    assert "http://x" not in message


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq_id", [0, 2**53 + 1, 680384511000000001, 2**63 - 1])
def test_seq_ids_are_not_rounded(seq_id: int) -> None:
    """A10, A14"""
    assert decode_sample(body(seq_id=seq_id)).seq_id == seq_id


@pytest.mark.parametrize("seq_id", ["-1", "9223372036854775808", "18446744073709551616", "1.0", "1e3", "true", '"1"'])
def test_seq_ids_beyond_int64(seq_id: str) -> None:
    """A10, D2"""
    assert "seq_id" in refusal(SDK_BODY.replace(b'"seq_id":0', b'"seq_id":' + seq_id.encode()))


@pytest.mark.parametrize("value", [0, -3, 100_000, 1025, 2**64])
def test_num_samples_range(value: int) -> None:
    """A21"""
    assert "num_samples" in refusal(body(num_samples=value))


@pytest.mark.parametrize("value", [0, -1, 2**31, 2**64])
def test_max_tokens_range(value: int) -> None:
    """A21"""
    assert "max_tokens" in refusal(body({"max_tokens": value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.0),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 1.5),
    ],
)
def test_sampling_params_ranges(name: str, value: Any) -> None:
    assert name in refusal(body({name: value}))


def test_sampling_params_at_their_bounds() -> None:
    assert params_of(temperature=0, top_p=1, top_k=0, seed=-(2**63), max_tokens=1) == SamplingParams(
        max_tokens=1, seed=-(2**63), temperature=0.0
    )
    assert params_of(temperature=2, seed=2**63 - 1, top_k=5) == SamplingParams(seed=2**63 - 1, temperature=2.0, top_k=5)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400", "18446744073709551616"])
def test_no_number_becomes_another(literal: str) -> None:
    """D2"""
    for place in (b'"temperature":0.7', b'"num_samples":2', b'"topk_prompt_logprobs":2'):
        name = place.split(b":")[0]
        refusal(SDK_BODY.replace(place, name + b":" + literal.encode()))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": 10_000}, "topk_sample_logprobs"),
        ({"target_prompt_logprobs": {"data": [1]}}, "target_prompt_logprobs"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n needs prompt_logprobs"),
        ({"prompt_logprobs_last_n": 0, "prompt_logprobs": True}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs_last_n": 3, "prompt_logprobs": True}, "prompt_logprobs_last_n"),
        ({"sampling_session_id": None}, "sampling_session_id"),
    ],
)
def test_what_cannot_be_honoured_is_named(fields: dict[str, Any], name: str) -> None:
    assert name in refusal(body(**fields))


def test_what_asks_for_nothing_is_accepted() -> None:
    fields: dict[str, Any] = {"record_stability_info": True, "target_prompt_logprobs": None}
    fields |= {"type": "sample", "later": {"a": [1]}}
    assert decode_sample(body(**fields)).spec == decode_sample(body()).spec


def test_last_n_up_to_the_length_less_one() -> None:
    assert decode_sample(body(prompt_logprobs=True, prompt_logprobs_last_n=2)).spec.prompt_logprobs_last_n == 2


# -- stop -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "meant"),
    [(None, None), ([], ()), ("a", ("a",)), (["a", "b"], ("a", "b")), ([0, 2**31 - 1], (0, 2**31 - 1))],
)
def test_stop(stop: Any, meant: Any) -> None:
    """`[]` and nothing at all are different requests."""
    assert params_of(stop=stop).stop == meant
    assert params_of().stop is None


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        (["a", 1], "all strings or all token ids"),
        (["a"] * 1025, "the most are 1,024"),
        ([""], "empty string"),
        ("", "empty string"),
        ([-1], "32-bit"),
        ([2**31], "32-bit"),
        ([1.0], "stop"),
        ([True], "stop"),
        (5, "stop"),
    ],
)
def test_stop_refused(stop: Any, words: str) -> None:
    assert words in refusal(body({"stop": stop}))


# -- hostile bodies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"1",
        b"\xff\xfe",
        b"\xef\xbb\xbf" + SDK_BODY,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        SDK_BODY.replace(b'"type":"sample"', b'"x":' + b"[" * 100_000 + b"]" * 100_000),
        SDK_BODY.replace(b'"ss"', b'"\\ud800"'),
        SDK_BODY.replace(b'"ss"', b'"\xff"'),
        SDK_BODY.replace(b'"type":"sample"', b'"x":"\xff"'),
        SDK_BODY.replace(b'"type":"sample"', b'"x":NaN'),
    ],
)
def test_hostile_bodies(data: bytes) -> None:
    """D2"""
    refusal(data)


@pytest.mark.parametrize(
    ("once", "twice"),
    [
        (b'"seq_id":0', b'"seq_id":0,"seq_id":1'),
        (b'"max_tokens":3', b'"max_tokens":3,"max_tokens":4'),
        (b'"tokens":[1,2,3,4,5]', b'"tokens":[1],"tokens":[2]'),
        (b'"seq_id":0', b'"seq_id":0,"\\u0073eq_id":0'),
        (b'"seq_id":0', b'"seq_id":0,"later":{"a":1,"a":1}'),
        (b'"stop":["\\n"]', b'"stop":[":"],"stop":["::"]'),
        (b'"type":"sample"', b'"type":"sample" , "type" : "sample"'),
    ],
)
def test_keys_given_twice(once: bytes, twice: bytes) -> None:
    """D2"""
    assert once in SDK_BODY
    assert "given twice" in refusal(SDK_BODY.replace(once, twice))


@pytest.mark.parametrize("stop", ["a:b", '"seq_id":', '{"a":1}', '"tokens":[1,"', '\\"tokens\\": [', "}{", "\\u003a:"])
def test_strings_that_look_like_keys_are_strings(stop: str) -> None:
    assert params_of(stop=[stop, stop]).stop == (stop, stop)


@pytest.mark.parametrize("field", ["base_model", "model_path"])
@pytest.mark.parametrize("name", ["", "m" * 401, "\u00e9" * 201])
def test_a_model_has_a_name_that_fits_into_an_id(field: str, name: str) -> None:
    unnamed: dict[str, Any] = {"sampling_session_id": None, field: name}
    assert "1 to 400 bytes" in refusal(body(**unnamed))
    named: dict[str, Any] = {"sampling_session_id": None, field: "\u00e9" * 200}
    assert decode_sample(body(**named)).spec.num_samples == 1


@pytest.mark.parametrize("value", [b"1", b"[]", b"{}", b'{"tokens":1}'])
def test_more_values_than_any_client_sends_are_refused(value: bytes) -> None:
    """D2: reading them all would hold up everybody else of this worker."""
    crowd = b"[" + b",".join([value] * MAX_VALUES) + b"]"
    assert str(MAX_VALUES) in refusal(SDK_BODY.replace(b'"type":"sample"', b'"x":' + crowd))


def test_the_tokens_themselves_are_not_counted() -> None:
    tokens = [7] * (MAX_VALUES + 2)
    assert decode_sample(body(prompt=prompt({"tokens": tokens}))).spec.prompt_tokens == len(tokens)


def test_a_body_full_of_the_word_tokens_is_read_once() -> None:
    """D2: read to its end from each of them, a long one takes minutes."""
    words = b'"x":[' + b",".join([b'"tokens"'] * (MAX_VALUES // 2)) + b'],"y":"' + b"z" * 2**19 + b'"'
    assert decode_sample(SDK_BODY.replace(b'"type":"sample"', words)).spec.prompt == b"1,2,3,4,5"


@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_any_json_is_a_call_or_a_refusal(document: Any) -> None:
    for fields in ({"prompt": document}, {"sampling_params": document}, {"seq_id": document}, {"later": document}):
        try:
            assert isinstance(decode_sample(body(**fields)), SampleCall)
        except BadRequest as error:
            assert str(error)


@given(st.binary(max_size=60))
def test_any_bytes_are_refused(data: bytes) -> None:
    refusal(data)


# -- the digest -------------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {
    "num_samples": 1,
    "prompt_logprobs": False,
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "prompt_alt_tokens_k": 0,
    "record_stability_info": False,
    "type": "sample",
}
PARAM_DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_k": -1, "top_p": 1.0}


@given(
    tokens=st.lists(st.integers(0, 200_000), min_size=1, max_size=5),
    split=st.integers(0, 5),
    sent=st.sets(st.sampled_from(sorted(DEFAULTS))),
    sent_params=st.sets(st.sampled_from(sorted(PARAM_DEFAULTS))),
    seq_id=st.integers(0, 2**63 - 1),
    indent=st.sampled_from([None, 0, 3]),
    order=st.randoms(use_true_random=False),
)
def test_equal_meaning_gives_equal_digests(
    tokens: list[int], split: int, sent: set[str], sent_params: set[str], seq_id: int, indent: int | None, order: Any
) -> None:
    """A18: white space, order, defaults sent or left out, and where the prompt is cut into chunks do not count."""
    written: dict[str, Any] = {
        "sampling_session_id": "ss",
        "seq_id": seq_id,
        "prompt": prompt({"tokens": tokens[:split]}, {"tokens": tokens[split:]}),
        "sampling_params": {name: PARAM_DEFAULTS[name] for name in sent_params},
    } | {name: DEFAULTS[name] for name in sent}
    keys = list(written)
    order.shuffle(keys)
    data = json.dumps({key: written[key] for key in keys}, indent=indent).encode()
    plain = body(prompt=prompt({"tokens": tokens, "type": "encoded_text"}))
    assert decode_sample(data).spec.digest == decode_sample(plain).spec.digest


DIFFERENT = [
    body(),
    body(prompt=prompt({"tokens": [1, 2]})),
    body(prompt=prompt({"tokens": [12, 3]})),
    body(num_samples=2),
    body(prompt_logprobs=True),
    body(prompt_logprobs=True, prompt_logprobs_last_n=1),
    body(topk_prompt_logprobs=1),
    body(topk_sample_logprobs=1),
    body({"max_tokens": 3}),
    body({"seed": 3}),
    body({"stop": []}),
    body({"stop": ["1"]}),
    body({"stop": [1]}),
    body({"stop": [1, 2]}),
    body({"temperature": 0.5}),
    body({"top_k": 3}),
    body({"top_p": 0.5}),
]


def test_different_meaning_gives_different_digests() -> None:
    """A18"""
    assert len({decode_sample(data).spec.digest for data in DIFFERENT}) == len(DIFFERENT)


def test_two_ways_to_say_one_thing() -> None:
    """A18"""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"stop": "a"}, {"stop": ["a"]}),
        ({"top_k": 0}, {"top_k": -1}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"temperature": -0.0}, {"temperature": 0}),
    ]
    for one, other in pairs:
        assert decode_sample(body(one)).spec.digest == decode_sample(body(other)).spec.digest


# -- images -----------------------------------------------------------------------------------------------------------

PNG: Final = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(range(40))).decode()
JPEG: Final = base64.b64encode(b"\xff\xd8\xff\xe0" + bytes(range(41))).decode()


def picture(data: Any = PNG, format_: Any = "png", **more: Any) -> dict[str, Any]:
    return {"type": "image", "data": data, "format": format_, **more}


def test_images_keep_their_places_and_order() -> None:
    chunks = prompt({"tokens": [1, 2]}, picture(expected_tokens=9), {"tokens": [3]}, picture(JPEG, "jpeg"))
    spec = decode_sample(body(prompt=chunks)).spec
    assert spec.prompt == b"1,2,?,3,?"
    assert spec.images == (Image("png", PNG.encode()), Image("jpeg", JPEG.encode()))
    # What is not expected counts as the one token that stands for it.
    assert spec.prompt_tokens == 2 + 9 + 1 + 1
    assert spec.size_bytes == len(spec.prompt) + len(PNG) + len(JPEG)


@pytest.mark.parametrize("chunks_beside", [0, 100])
def test_a_long_image_is_taken_as_a_short_one_is(chunks_beside: int) -> None:
    data = PNG.rstrip("=")[:48] + "AB+/" * 100_000
    chunks = [{"tokens": [1]}] * chunks_beside + [picture(data, expected_tokens=3)]
    call = decode_sample(body(prompt=prompt(*chunks)))
    assert call.spec.images == (Image("png", data.encode()),)
    assert call.spec.prompt == b"1," * chunks_beside + b"?"
    assert call.spec.prompt_tokens == chunks_beside + 3
    assert "base64" in refusal(body(prompt=prompt(*chunks[:-1], picture(data[:-8] + "AB-_AAAA"))))


def test_escaped_slashes_are_slashes() -> None:
    data = PNG[:48] + "AB+/" * 20
    sent = body(prompt=prompt(picture(data))).replace(b"/", b"\\/")
    assert decode_sample(sent).spec.images == (Image("png", data.encode()),)
    assert "base64" in refusal(sent.replace(b"\\/", b"\\n"))


def test_an_image_alone_is_a_prompt_and_may_leave_its_type_out() -> None:
    alone = {name: value for name, value in picture().items() if name != "type"}
    assert decode_sample(body(prompt=prompt(alone))).spec.prompt == b"?"


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (picture(format_="gif"), "png or jpeg"),
        (picture(format_=None), "png or jpeg"),
        (picture(format_=["png"]), "png or jpeg"),
        (picture(data=None), "base64"),
        (picture(data=""), "base64"),
        (picture(data=7), "base64"),
        (picture(data=PNG[:-1]), "base64"),
        (picture(data=PNG + "===="), "base64"),
        (picture(data="iVBO\nRw0K"), "base64"),
        (picture(data=PNG[:-4] + '"},{'), "base64"),
        (picture(data="http://169.254.169.254/"), "base64"),
        (picture(data="\u00e9" * 8), "base64"),
        (picture(data=JPEG), "is no png file"),
        (picture(data=PNG, format_="jpeg"), "is no jpeg file"),
        (picture(data="aGk="), "is no png file"),
        (picture(expected_tokens=0), "expected_tokens"),
        (picture(expected_tokens=True), "expected_tokens"),
        (picture(expected_tokens="9"), "expected_tokens"),
    ],
)
def test_what_is_no_image_is_refused_by_its_place(chunk: dict[str, Any], words: str) -> None:
    """What is handed on is nothing but the characters of base64: no address, and nothing that ends a string."""
    message = refusal(body(prompt=prompt({"tokens": [1]}, chunk)))
    assert words in message
    assert "prompt chunk 1" in message


def test_another_image_is_another_request() -> None:
    other = base64.b64encode(base64.b64decode(PNG) + b"abc").decode()
    asked = [prompt(picture()), prompt(picture(other)), prompt({"tokens": [1]}), prompt(picture(), picture(other))]
    digests = {decode_sample(body(prompt=one)).spec.digest for one in [*asked, prompt(picture(other), picture())]}
    assert len(digests) == 5
