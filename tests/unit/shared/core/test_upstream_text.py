from __future__ import annotations

import json

import pytest

from shared.core.faults import BreakKind, classify_break, classify_load, classify_reply
from shared.core.upstream_text import shown, shown_words, without_objects
from tests.vllm_recordings import recording

PROMPT = "the secret plan of Karla"


@pytest.mark.parametrize(
    "name",
    [
        "21_temp0_n4",
        "24_load_rank_too_big",
        "30_404",
        "30_logprobs_21",
        "30_max_tokens_over_len",
        "30_n0",
        "30_prompt_empty_list",
        "30_prompt_eq_maxlen",
        "30_prompt_too_long",
        "30_temp_big",
        "30_top_p0",
        "33_killcore_inflight1",
        "34_badauth",
        "34_ovl_3",
        "35_nan_logprobs0",
        "60_vllm_all_die",
        "60_vllm_lim_payload",
    ],
)
def test_what_vllm_is_known_to_say_is_shown_as_it_is(name: str) -> None:
    reply = recording(name)
    text = reply.body.decode()
    assert shown_words(reply.body).rpartition("Error: ")[2] in text.replace("\\n", " ")
    assert any(char in shown_words(reply.body) for char in ".nNds")
    assert shown(shown_words(reply.body).rpartition("Error: ")[2]) == shown_words(reply.body).rpartition("Error: ")[2]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("Token id 31101 is out of vocabulary", "Token id is out of vocabulary"),
        ("The model `secret` does not exist.", "The model"),
        ("the server's disk is full", "the server's disk is full"),
        ("value b's3cret plan' is bad", "value b"),
        ("cannot read 'it's a plan' at all", "cannot read"),
        ("<html><head><title>502 Bad Gateway</title></head><body>x</body></html>", "502 Bad Gateway"),
        ("<html><title>Karla's page 7</title>secret</html>", "Karla's page"),
        ("<p>secret</p>", ""),
        ("  one\n\ttwo\x1b\x00three ", "one twothree"),
        ("a" * 200, "a" * 80),
        ("٣١ digits of any script", "digits of any script"),
        ("", ""),
    ],
)
def test_of_other_words_a_few_are_shown_without_digits_and_quotes(words: str, expected: str) -> None:
    assert shown(words) == expected


@pytest.mark.parametrize(
    "quoting", ["'{}'", '"{}"', "`{}`", "“{}”", "[{}]", "{{'input': '{}'}}", "<{}>", "b'{}'", "«{}»"]
)
@pytest.mark.parametrize("sentence", ["cannot read {}", "cannot read {}, since {} is wrong", "{}"])
@pytest.mark.parametrize("prompt", [PROMPT, f"it's {PROMPT}", f'"quoted" {PROMPT}', "31101, 31102"])
def test_a_quoted_prompt_is_never_shown(quoting: str, sentence: str, prompt: str) -> None:
    quoted = quoting.format(prompt)
    for words in (sentence.format(quoted, quoted), sentence.format(quoted, quoted)[:-3]):
        for body in (words.encode(), json.dumps({"error": {"message": words, "type": f"Bad {prompt}"}}).encode()):
            for text in (shown(words), shown_words(body), classify_reply(500, body, {}).for_operators):
                assert "Karla" not in text and "secret" not in text and "31101" not in text, text
            assert quoted[:8] in classify_reply(400, body, {}).message, "its own client gets all of it"
            fault = classify_load(500, body, "tinker://run/1", 60.0)
            assert fault is not None and "Karla" not in fault.message, "is kept for others"


def test_the_type_of_an_error_is_shown() -> None:
    body = json.dumps({"error": {"message": "no 'x'", "type": "BadRequestError", "code": 400}}).encode()
    assert classify_reply(400, body, {}).for_operators == "upstream answered 400: BadRequestError: no"


@pytest.mark.parametrize("kind", BreakKind)
def test_a_client_sees_neither_addresses_nor_objects(kind: BreakKind) -> None:
    detail = (
        "unable to perform operation on <TCPTransport closed=True reading=False 0x55d1ba3cf2a0>; the handler is closed"
    )
    fault = classify_break(kind, "http://10.1.2.3:8100", detail)
    assert "10.1.2.3" not in fault.message and "0x" not in fault.message
    assert "10.1.2.3" in fault.for_operators and "0x" not in fault.for_operators


def test_python_names_objects_in_many_ways() -> None:
    assert without_objects("<uvloop.loop.TCPTransport object at 0x7f00deadbeef> is closed") == "... is closed"
    assert (
        without_objects("[Errno 111] Connect call failed ('127.0.0.1', 1)")
        == "[Errno 111] Connect call failed ('127.0.0.1', 1)"
    )
