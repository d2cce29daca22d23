"""Every decoder, on damaged real bytes: a value, or the one error that its docstring names. Nothing else is raised."""

from __future__ import annotations

import asyncio
import json
import posixpath
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import hiredis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admin.upstreams import read_list
from gateway.settings.keys_file import new_entry, parse_keys
from shared.core import ids, upstream_list
from shared.core.adapters import Naming
from shared.core.callers import KeyLimits
from shared.core.errors import BadRequest, ConfigError, StoreError, StoreRefused
from shared.core.faults import Fault, classify_load, classify_reply
from shared.core.lifecycle import State
from shared.core.model import SampleKey, SampleSpec, SamplingParams
from shared.core.record import BadRecord, Claim, pack, unpack, unpack_header
from shared.core.upstream_protocol import UpstreamProtocol
from shared.redis.connection import RedisConnection, error_of
from shared.store import schema
from shared.wire import json_arrays, openai, trainer
from shared.wire.sdk import calls, result
from shared.wire.sdk.sample import SampleCall, decode_sample
from shared.wire.vllm import Decoded, UpstreamCall, combine, decode_reply, long_reply
from tests.fuzz.damage import damaged
from tests.vllm_recordings import NAMES, recording
from workers.samples import messages
from workers.upstream.catalogue import decode_listing

if TYPE_CHECKING:
    from collections.abc import Callable

# Looking as often as the profile says; a slow machine is no failure.
fuzz = settings(deadline=None)

RECORDED: Final = [one for one in map(recording, NAMES) if one.asked.get("prompt") or one.asked.get("token_ids")]
SAMPLE: Final = json.dumps(
    {
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 3, "stop": ["\n"], "temperature": 0.7, "top_k": -1, "top_p": 1.0},
        "sampling_session_id": "ss",
        "seq_id": 0,
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "type": "sample",
    }
).encode()
CLAIM: Final = Claim("worker-000000001", 1, 1, bytes(16))
KEY: Final = SampleKey("K", 2**63 - 1)


def allowed(call: Callable[[], Any], *errors: type[Exception]) -> Any:
    """What `call` returns; None for an error that it may raise, which must say something."""
    try:
        return call()
    except errors as error:
        assert str(error)
        return None


@fuzz
@given(
    damaged(*(one.body for one in RECORDED)), st.sampled_from(RECORDED), st.sampled_from(sorted(json_arrays.LOADERS))
)
def test_replies_of_vllm(body: bytes, asked: Any, loader: str) -> None:
    """D3, D4, D13, D14"""
    found = decode_reply(asked.call, asked.spec, body, json_arrays.LOADERS[loader])
    assert isinstance(found, (Decoded, Fault))


@fuzz
@given(damaged(*(one.body for one in RECORDED)), st.sampled_from(RECORDED), st.integers(1, 100))
def test_long_replies_of_vllm(body: bytes, asked: Any, piece_bytes: int) -> None:
    """Read in parts, a reply is what it is as a whole, or nothing is said; where nobody looks, it may be no JSON."""
    reply = long_reply.load(body, asked.call.sequences, piece_bytes)
    if reply is not None and not asked.call.scores and not asked.spec.topk_sample_logprobs:
        found = decode_reply(asked.call, asked.spec, body, lambda _: reply)
        whole = decode_reply(asked.call, asked.spec, body, json_arrays.load)
        unseen = any(words in str(whole) for words in ("no completion", "no JSON"))
        assert found == whole or isinstance(found, Fault) or unseen


def _encoded_result() -> bytes:
    call, spec = UpstreamCall(b"", 1, False), SampleSpec(b"10", 1, 1, SamplingParams(max_tokens=2))
    choice = {
        "index": 0,
        "logprobs": {"token_logprobs": [-0.5, -1.5], "tokens": [], "top_logprobs": []},
        "finish_reason": "length",
        "token_ids": [5, 6],
    }
    found = decode_reply(call, spec, json.dumps({"choices": [choice], "usage": {}}).encode())
    assert isinstance(found, Decoded)
    return result.encode_sample_response(combine(spec, [found]))


@fuzz
@given(damaged(_encoded_result()))
def test_stored_results(data: bytes) -> None:
    allowed(lambda: result.decode_sample_response(data), ValueError)
    text = allowed(lambda: result.sample_response_json(data), ValueError)
    assert text is None or isinstance(json.loads(text), dict)


PICTURE: Final = json.dumps(
    {
        "prompt": {"chunks": [{"tokens": [1]}, {"type": "image", "format": "png", "data": "iVBORw0KGgoA"}]},
        "sampling_session_id": "ss",
        "seq_id": 0,
    }
).encode()


@fuzz
@given(damaged(SAMPLE, PICTURE))
def test_samples(body: bytes) -> None:
    """A13, D2"""
    call = allowed(lambda: decode_sample(body), BadRequest)
    assert call is None or isinstance(call, SampleCall)


POLL: Final = (
    b'{"target":{"type":"sampling_session","sampling_session_id":"s","cloned_sampler_id":0},"prev_cursor":4294967297,'
    b'"timeout":30.5,"retrieved_request_ids":["s:1","s:2"]}'
)


@pytest.mark.parametrize(
    ("decode", "body"),
    [
        (
            partial(calls.decode_body, calls.CreateSession),
            b'{"tags":["a"],"user_metadata":{"b":1},"sdk_version":"0.38.0"}',
        ),
        (partial(calls.decode_body, calls.Heartbeat), b'{"session_id":"s","type":"session_heartbeat"}'),
        (calls.decode_finish, b'{"reason":{"type":"success"},"detail":null}'),
        (calls.decode_create_sampling_session, b'{"session_id":"s","sampling_session_seq_id":0,"base_model":"m"}'),
        (partial(calls.decode_body, calls.Join), b'{"sampling_session_id":"s"}'),
        (calls.decode_retrieve_future, b'{"request_id":"s:1","allow_metadata_only":true}'),
        (calls.decode_retrieve_futures, POLL),
        (calls.decode_cancel_future, b'{"request_id":"s:1"}'),
        (calls.decode_client_config, b'{"sdk_version":"0.38.0"}'),
        (partial(calls.decode_body, calls.WeightsInfo), b'{"tinker_path":"tinker://r/sampler_weights/1"}'),
        (trainer.decode_save_for_sampler, b'{"model_id":"s:train:0","path":"p"}'),
    ],
    ids=lambda value: getattr(value.args[0] if isinstance(value, partial) else value, "__name__", ""),
)
def test_other_requests(decode: Callable[[bytes], Any], body: bytes) -> None:
    """A13, D2"""

    @fuzz
    @given(damaged(body))
    def look(data: bytes) -> None:
        allowed(lambda: decode(data), BadRequest)

    look()


OPENAI: Final = (
    b'{"model":"m","prompt":["a","b"],"max_tokens":5,"n":2,"best_of":3,"stream":true}',
    b'{"model":"m","prompt":[[1,2],[3]],"max_completion_tokens":null,"temperature":1.50}',
    b'{"model":"m","messages":[{"role":"user","content":"a"}],"max_completion_tokens":7,"logprobs":true}',
)


@fuzz
@given(damaged(*OPENAI))
def test_calls_of_openais_clients(body: bytes) -> None:
    """A13, D2: what is passed on is JSON with one model, whatever came."""
    call = allowed(lambda: openai.decode_call(body), BadRequest)
    if call is not None:
        passed_on = call.encode("theirs")
        assert json.loads(passed_on, object_pairs_hook=list).count(("model", "theirs")) == 1


@fuzz
@given(
    damaged(
        b'{"session_id":"s-1","info_message":"hi"}',
        b'{"request_id":"17","model_id":"m"}',
        b'{"path":null,"sampling_session_id":"s:sample:0","type":"save_weights_for_sampler"}',
        b'{"sampler_id":"x","base_model":"b","model_path":"tinker://r/w"}',
    )
)
def test_answers_of_a_training_server(body: bytes) -> None:
    for read in (
        trainer.session_id_of,
        trainer.promised_id,
        trainer.saved,
        trainer.sampler_info,
        trainer.base_model_of,
    ):
        read(body)
    changed = allowed(lambda: trainer.replaced(body, "request_id", "ours"), ValueError)
    # Text that is none reaches the client as the server wrote it.
    assert changed is None or json.loads(changed.decode("utf-8", "replace"))["request_id"] == "ours"


@fuzz
@given(
    damaged(*(one.body for one in map(recording, NAMES) if one.status != 200), b'{"detail":"Not Found"}', b"upstream"),
    st.integers(201, 599),
    st.sampled_from(["", "3", "1e400", "-1", "nan", "Wed, 21 Oct 2026 07:28:00 GMT"]),
    st.sampled_from(list(UpstreamProtocol)),
)
def test_refusals_of_upstreams(body: bytes, status: int, retry_after: str, protocol: UpstreamProtocol) -> None:
    """D8, D10: one Fault with words that any reply can carry, and a pause that somebody would wait for."""
    headers = {"Retry-After": retry_after} if retry_after else {}
    for fault in (
        classify_reply(status, body, headers, protocol),
        classify_load(status, body, "tinker://r/1", 60.0),
    ):
        if fault is not None:
            assert fault.message.encode()
            assert fault.retry_after_s is None or 0.0 <= fault.retry_after_s <= 600.0


@fuzz
@given(
    damaged(b"tinker://run-1/sampler_weights/000100", b"tinker://a:train:0/b").map(lambda data: data.decode("latin-1"))
)
def test_paths_of_adapters(path: str) -> None:
    """None leads out of the directory that the operator named."""
    adapter = Naming("{run_id}--{checkpoint}", "/adapters/{run_id}/{checkpoint}").adapter(path)
    if adapter is not None and adapter.directory is not None:
        assert posixpath.normpath(adapter.directory) == adapter.directory
        assert adapter.directory.startswith("/adapters/")
        assert adapter.directory.count("/") == 3
        assert adapter.directory.isprintable()


@fuzz
@given(damaged(new_entry("alice", "tml-a", KeyLimits(max_in_flight=3, max_in_flight_bytes=9)).encode()))
def test_files_of_keys(data: bytes) -> None:
    """Every key that is let in has a whole hash, and a name that can be shown."""
    text = data.decode("latin-1")
    keys = allowed(lambda: parse_keys(text, "keys.toml"), ConfigError)
    for key in keys or ():
        assert len(bytes.fromhex(key.sha256)) == 32
        assert key.name.isprintable()


SESSION: Final = ids.new_session_id(bytes(16), b"secret")


@fuzz
@given(damaged(SESSION.encode(), f"{SESSION}:7".encode(), b"gwss-x.y.bz:1").map(lambda data: data.decode("latin-1")))
def test_ids(text: str) -> None:
    """A7"""
    ids.split_request_id(text)
    ids.parse_sampling_session(text, b"secret")
    assert ids.owns_session(text, b"secret") is (text == SESSION)


@fuzz
@given(damaged(pack(State.READY, CLAIM, b"payload")))
def test_records(data: bytes) -> None:
    allowed(lambda: unpack(data), BadRecord)
    allowed(lambda: unpack_header(data), StoreRefused)


@fuzz
@given(
    damaged(schema.log_entry(KEY, State.READY, 10, 1_790_000_000_000)),
    st.integers(0, 2**21),
    st.integers(0, 2**32),
    st.sampled_from([0, 1]),
)
def test_completion_logs(entry: bytes, epoch: int, n: int, known: int) -> None:
    allowed(lambda: schema.log_page([known, epoch, n, [entry]], 0), StoreRefused)


@fuzz
@given(damaged(messages.cancel_message(KEY), messages.finish_message("s"), b"upstreams"))
def test_messages_between_workers(data: bytes) -> None:
    messages.parse(data)


@fuzz
@given(damaged(b'["http://10.0.0.5:8000"]', b'{"upstreams":[]}'))
def test_lists_of_upstreams(data: bytes) -> None:
    allowed(lambda: read_list(data), ValueError)
    allowed(lambda: upstream_list.unpack(b"7 " + data), StoreRefused)


@fuzz
@given(damaged(b'{"data":[{"id":"m","max_model_len":64},{"id":"r","parent":"m"}]}'))
def test_lists_of_models(data: bytes) -> None:
    allowed(lambda: decode_listing(data), ValueError)


@fuzz
@given(damaged(b"# Server\r\nredis_version:7.4.1\r\nused_memory:10\r\nmaxmemory:0\r\n"))
def test_what_redis_tells_of_itself(data: bytes) -> None:
    allowed(lambda: schema.store_info(schema.parse_info(data)), StoreRefused)
    allowed(lambda: schema.check_version(schema.parse_info(data), "here"), StoreRefused)


@fuzz
@given(
    damaged(b"MOVED 3999 127.0.0.1:6381", b"ASK 3999 h:1", b"OOM command not allowed").map(
        lambda data: data.decode("latin-1")
    )
)
def test_refusals_of_redis(text: str) -> None:
    assert isinstance(error_of(hiredis.ReplyError(text)), StoreError)


LINES: Final = (
    b"+OK\r\n:1\r\n$3\r\nabc\r\n*2\r\n$1\r\na\r\n$-1\r\n>3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n-ERR no\r\n_\r\n"
)


@fuzz
@given(damaged(LINES), st.integers(1, 40))
def test_lines_of_redis(data: bytes, piece_bytes: int) -> None:
    """C1: whatever comes, each command has at most one reply, and an end."""

    async def talk() -> None:
        connection = RedisConnection(on_push=lambda _: None)
        asked = [connection.ask("GET", "a") for _ in range(5)]
        for start in range(0, len(data), piece_bytes):
            connection.data_received(data[start : start + piece_bytes])
        connection.connection_lost(None)
        replies = await asyncio.gather(*asked, return_exceptions=True)
        unexpected = [reply for reply in replies if isinstance(reply, Exception)]
        assert all(isinstance(error, (StoreError, hiredis.ReplyError)) for error in unexpected), unexpected

    asyncio.run(talk())
