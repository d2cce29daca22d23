from __future__ import annotations

import json

import pytest

from shared.core.faults import (
    BreakKind,
    Fault,
    FaultClass,
    classify_break,
    classify_load,
    classify_reply,
)
from shared.core.model import Category
from shared.core.upstream_protocol import UpstreamProtocol
from shared.core.upstream_text import upstream_words
from tests.vllm_recordings import recording

USER, SERVER = Category.USER, Category.SERVER
NEVER, INTERRUPTED = FaultClass.NEVER_EXECUTED, FaultClass.INTERRUPTED
AMBIGUOUS, REFUSED = FaultClass.AMBIGUOUS, FaultClass.REFUSED


def vllm_error(message: str, kind: str = "BadRequestError") -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": 400}}).encode()


SGLANG_LOST = b'{"error":{"type":"x","code":"call_upstream_request_error","message":"lost"}}'
SGLANG_CUT = b'{"error":{"type":"x","code":"read_response_body_failed","message":"cut"}}'

TABLE = [
    (429, b"", NEVER, SERVER),
    (408, b"", NEVER, SERVER),
    (503, b"No available workers (all circuits open or unhealthy)", NEVER, SERVER),
    (503, b"", NEVER, SERVER),
    (500, b"Request failed: error sending request for url (http://h/v1/completions)", INTERRUPTED, SERVER),
    (500, b"Failed to get response body: closed", INTERRUPTED, SERVER),
    (500, SGLANG_LOST, INTERRUPTED, SERVER),
    (500, SGLANG_CUT, INTERRUPTED, SERVER),
    (500, vllm_error("list index out of range"), AMBIGUOUS, SERVER),
    (502, b"<html>bad gateway</html>", AMBIGUOUS, SERVER),
    (504, b"", AMBIGUOUS, SERVER),
    (408, b"a proxy's deadline", AMBIGUOUS, SERVER),
    (204, b"", AMBIGUOUS, SERVER),
    (307, b"", REFUSED, SERVER),
    (400, vllm_error("n must be at least 1, got 0."), REFUSED, USER),
    (400, vllm_error("Out of range float values are not JSON compliant"), REFUSED, SERVER),
    (401, b'{"error":"Unauthorized"}', REFUSED, SERVER),
    (403, b"", REFUSED, SERVER),
    (404, vllm_error("The model `x` does not exist."), REFUSED, USER),
    (404, b'{"detail":"Not Found"}', REFUSED, SERVER),
    (405, b'{"detail":"Method Not Allowed"}', REFUSED, SERVER),
    (413, b"length limit exceeded", REFUSED, USER),
    (422, b"Failed to deserialize", REFUSED, USER),
]


@pytest.mark.parametrize("protocol", UpstreamProtocol)
@pytest.mark.parametrize(("status", "body", "kind", "category"), TABLE)
def test_reply_table(
    status: int, body: bytes, kind: FaultClass, category: Category, protocol: UpstreamProtocol
) -> None:
    fault = classify_reply(status, body, {}, protocol)
    assert (fault.kind, fault.category, fault.upstream_down) == (kind, category, False)


RECORDED = [
    ("21_temp0_n4", REFUSED, USER, False),
    ("24_gen_unknown_adapter", REFUSED, USER, False),
    ("24_load_rank_too_big", AMBIGUOUS, SERVER, False),
    ("30_404", REFUSED, SERVER, False),
    ("30_malformed", REFUSED, USER, False),
    ("30_prompt_eq_maxlen", REFUSED, USER, False),
    ("30_tok_oov", REFUSED, USER, False),
    ("33_killcore_inflight1", INTERRUPTED, SERVER, True),
    ("33_killcore_later_2_0.1s", INTERRUPTED, SERVER, True),
    ("33_killworker_inflight1", INTERRUPTED, SERVER, True),
    ("34_badauth", REFUSED, SERVER, False),
    ("34_noauth", REFUSED, SERVER, False),
    ("34_ovl_3", NEVER, SERVER, False),
    ("35_nan_logprobs0", REFUSED, SERVER, False),
    ("50_gen_unknown_model", REFUSED, USER, False),
    ("60_vllm_all_die", INTERRUPTED, SERVER, False),
    ("60_vllm_all_down_3", INTERRUPTED, SERVER, False),
    ("60_vllm_b_lp_true", REFUSED, USER, False),
    ("60_vllm_b_malformed", REFUSED, USER, False),
    ("60_vllm_b_seed_big", REFUSED, USER, False),
    ("60_vllm_lim_payload", REFUSED, USER, False),
    ("60_vllm_noretry_500", AMBIGUOUS, SERVER, False),
    ("60_vllm_q0_1", NEVER, SERVER, False),
]


@pytest.mark.parametrize(("name", "kind", "category", "down"), RECORDED)
def test_recorded_replies(name: str, kind: FaultClass, category: Category, down: bool) -> None:
    told = recording(name)
    assert told.status is not None
    fault = classify_reply(told.status, told.body, told.headers)
    assert (fault.kind, fault.category, fault.upstream_down) == (kind, category, down)


def test_nan_is_the_servers_fault_and_final() -> None:
    """D10"""
    told = recording("35_nan_logprobs0")
    fault = classify_reply(400, told.body, told.headers)
    assert fault.kind is REFUSED and fault.category is SERVER
    assert "NaN" in fault.message


def test_a_missing_model_is_told_from_other_refusals() -> None:
    told = recording("24_gen_unknown_adapter")
    assert told.status is not None
    missing = classify_reply(told.status, told.body, told.headers)
    assert (missing.kind, missing.model_missing) == (REFUSED, True)
    assert not classify_reply(404, b'{"detail":"Not Found"}', {}).model_missing
    assert not classify_reply(400, b'{"error":{"message":"no"}}', {}).model_missing


@pytest.mark.parametrize(("status", "missing"), [(401, False), (403, True), (404, True), (405, True), (400, False)])
def test_an_endpoint_that_is_not_there_is_told_from_other_refusals(status: int, missing: bool) -> None:
    fault = classify_reply(status, b'{"detail":"no"}', {}, UpstreamProtocol.GENERATE)
    assert fault.generate_missing is missing
    assert ("--enable-scale-out" in fault.message) is missing
    assert not classify_reply(status, b'{"detail":"no"}', {}).generate_missing
    unknown = recording("50_gen_unknown_model")
    assert not classify_reply(404, unknown.body, {}, UpstreamProtocol.GENERATE).generate_missing


@pytest.mark.parametrize(
    ("status", "body", "invalid"),
    [
        (400, vllm_error("n must be at most 8"), True),
        (422, b"no", True),
        (413, b"", False),
        (404, vllm_error("no such model"), False),
        (400, vllm_error("Out of range float values are not JSON compliant"), False),
        (408, b"a deadline", False),
        (500, b"", False),
    ],
)
def test_what_was_refused_before_it_ran(status: int, body: bytes, invalid: bool) -> None:
    """A NaN has run; a deadline may have."""
    assert classify_reply(status, body, {}).invalid is invalid


def test_operator_is_told_which_flag_to_set() -> None:
    assert "--upstream-api-key-file" in classify_reply(401, b'{"error":"Unauthorized"}', {}).message


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("1", 1.0), ("0.5", 0.5), ("99999999", 600.0), ("-1", None), ("nan", None), ("soon", None), ("", None)],
)
def test_retry_after(value: str, seconds: float | None) -> None:
    for name in ("Retry-After", "retry-after"):
        assert classify_reply(429, b"", {name: value}).retry_after_s == seconds


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":{"message":"m"}}', "m"),
        (b'{"error":"Unauthorized"}', "Unauthorized"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"message":"m"}', "m"),
        (b"plain", "plain"),
        (b'{"error":{}}', '{"error":{}}'),
        (b"[1]", "[1]"),
        (b"\xff", "�"),
        (b'{"error":"\\ud800"}', "?"),
        (b"[" * 60_000, "[" * 500),
        (b"", ""),
    ],
)
def test_upstream_words(body: bytes, words: str) -> None:
    assert upstream_words(body) == words


def test_words_are_shortened() -> None:
    message = classify_reply(400, vllm_error("x" * 100_000), {}).message
    assert len(message) < 550


BREAKS = {
    BreakKind.CONNECT_REFUSED: (NEVER, True),
    BreakKind.DNS: (NEVER, True),
    BreakKind.CONNECT_TIMEOUT: (NEVER, True),
    BreakKind.TLS: (NEVER, True),
    BreakKind.CLOSED_BEFORE_WRITE: (NEVER, False),
    BreakKind.RESET_BEFORE_STATUS: (INTERRUPTED, True),
    BreakKind.DRAINING: (INTERRUPTED, True),
    BreakKind.READ_TIMEOUT: (AMBIGUOUS, False),
    BreakKind.BODY_CUT: (AMBIGUOUS, False),
    BreakKind.NOT_HTTP: (AMBIGUOUS, False),
    BreakKind.ANOTHERS_REPLY: (FaultClass.WRONG_REPLY, False),
}


@pytest.mark.parametrize("kind", BreakKind)
def test_break_table(kind: BreakKind) -> None:
    fault = classify_break(kind, "http://h", "words")
    assert (fault.kind, fault.upstream_down) == BREAKS[kind]
    assert fault.category is SERVER
    assert fault.message == f"upstream: {kind.value}"
    assert fault.for_operators == f"upstream: {kind.value} (http://h: words)"


def test_break_without_detail() -> None:
    assert classify_break(BreakKind.DNS) == Fault(
        NEVER, "upstream: name not resolved", upstream_down=True, log_text="upstream: name not resolved"
    )


LORA_PATH = "tinker://run-1/sampler_weights/3"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"Success: LoRA adapter 'x' added successfully."),
        (400, b'{"error":{"message":"x has already been loaded."}}'),
    ],
)
def test_an_adapter_that_is_there(status: int, body: bytes) -> None:
    assert classify_load(status, body, LORA_PATH, 60.0) is None


@pytest.mark.parametrize(
    ("status", "body", "category", "words", "wait_s"),
    [
        (404, b'{"error":{"message":"No adapter found for /x"}}', Category.USER, "No adapter found for /x", 60.0),
        (404, b'{"detail":"Not Found"}', Category.SERVER, "--enable-lora", 60.0),
        (405, b"", Category.SERVER, "--enable-lora", 60.0),
        (
            400,
            b'{"error":{"message":"LoRA rank 16 is greater than max_lora_rank 8."}}',
            Category.SERVER,
            "rank 16",
            60.0,
        ),
        (500, b"size mismatch for base_model.model", Category.SERVER, "size mismatch", 60.0),
        # Busy is not a refusal: worth the wait for any upstream.
        (503, b"later", Category.SERVER, "later", None),
        (429, b"", Category.SERVER, "429", None),
    ],
)
def test_load_table(status: int, body: bytes, category: Category, words: str, wait_s: float | None) -> None:
    fault = classify_load(status, body, LORA_PATH, 60.0)
    assert fault is not None
    assert (fault.kind, fault.category, fault.wait_s) == (FaultClass.NEVER_EXECUTED, category, wait_s)
    assert words in fault.message
    assert not fault.upstream_down
