"""Build the bytes of the SDK's requests, as version 0.38.0 sends them over HTTP/1.1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

if TYPE_CHECKING:
    from gateway.bench.load.transport import GatewayAddress
    from gateway.bench.load.workload import Sample, Workload

SDK_VERSION: Final = "0.38.0"
JSON: Final = "application/json"
PROTOBUF: Final = "application/x-protobuf"

_HEAD: Final = (
    "POST {path} HTTP/1.1\r\n"
    "Host: {authority}\r\n"
    "X-API-Key: {api_key}\r\n"
    "Accept: {accept}\r\n"
    "Content-Type: application/json\r\n"
    "User-Agent: AsyncTinker/Python {version}\r\n"
    "X-Stainless-Package-Version: {version}\r\n"
    "X-Stainless-OS: Linux\r\n"
    "X-Stainless-Arch: x64\r\n"
    "X-Stainless-Runtime: CPython\r\n"
    "X-Stainless-Async: async:asyncio\r\n"
    "X-Stainless-Retry-Count: 0\r\n"
    "X-Stainless-Read-Timeout: {timeout_s}\r\n"
    "{extra}"
    "Content-Length: "
)


class RequestTemplate:
    """The head of all requests to one path, all but its Content-Length. `read_timeout_s` is the SDK's own."""

    def __init__(
        self, target: GatewayAddress, api_key: str, name: str, read_timeout_s: int, accept: str = JSON, extra: str = ""
    ) -> None:
        self.name = name
        self.read_timeout_s = read_timeout_s
        self._head = _HEAD.format(
            path=f"{target.path}/api/v1/{name}",
            authority=target.authority,
            api_key=api_key,
            accept=accept,
            version=SDK_VERSION,
            timeout_s=read_timeout_s,
            extra=extra,
        ).encode("latin-1")

    def request(self, body: bytes) -> bytes:
        return b"%b%d\r\n\r\n%b" % (self._head, len(body), body)


class RequestTemplates:
    """One template for every path that the load client posts to."""

    def __init__(self, target: GatewayAddress, api_key: str) -> None:
        self.client_config = RequestTemplate(target, api_key, "client/config", 60)
        self.create_session = RequestTemplate(target, api_key, "create_session", 60)
        self.create_sampling_session = RequestTemplate(target, api_key, "create_sampling_session", 60)
        self.heartbeat = RequestTemplate(target, api_key, "session_heartbeat", 10)
        self.asample = RequestTemplate(target, api_key, "asample", 60, extra="X-Tinker-Sampling-Backpressure: 1\r\n")
        self.retrieve_future = RequestTemplate(
            target, api_key, "retrieve_future", 45, PROTOBUF, "X-Tinker-Request-Type: Sample\r\n"
        )
        self.retrieve_futures = RequestTemplate(target, api_key, "retrieve_futures", 45)
        self.acknowledge = RequestTemplate(target, api_key, "retrieve_futures", 5)
        self.cancel_future = RequestTemplate(target, api_key, "cancel_future", 30)


def client_config_body() -> bytes:
    return orjson.dumps({"sdk_version": SDK_VERSION})


def create_session_body() -> bytes:
    return orjson.dumps(
        {"tags": ["gateway-bench"], "user_metadata": {}, "sdk_version": SDK_VERSION, "type": "create_session"}
    )


def create_sampling_session_body(session_id: str, model: str) -> bytes:
    return orjson.dumps(
        {
            "session_id": session_id,
            "sampling_session_seq_id": 0,
            "base_model": model,
            "type": "create_sampling_session",
        }
    )


def heartbeat_body(session_id: str) -> bytes:
    return orjson.dumps({"session_id": session_id, "type": "session_heartbeat"})


def asample_body(workload: Workload, wanted: Sample, sampling_session_id: str, seq_id: int) -> bytes:
    return orjson.dumps(
        {
            "num_samples": workload.num_samples,
            "prompt": {"chunks": [{"tokens": wanted.prompt, "type": "encoded_text"}]},
            "sampling_params": {
                "max_tokens": workload.max_tokens,
                "seed": wanted.seed,
                "temperature": 1.0,
                "top_k": -1,
                "top_p": 1.0,
            },
            "sampling_session_id": sampling_session_id,
            "seq_id": seq_id,
            "prompt_logprobs": False,
            "topk_prompt_logprobs": 0,
            "topk_sample_logprobs": 0,
            "prompt_alt_tokens_k": 0,
            "record_stability_info": False,
            "type": "sample",
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def retrieve_future_body(request_id: str, allow_metadata_only: bool) -> bytes:
    return orjson.dumps({"request_id": request_id, "allow_metadata_only": allow_metadata_only})


def cancel_future_body(request_id: str) -> bytes:
    return orjson.dumps({"request_id": request_id})


def retrieve_futures_body(
    sampling_session_id: str, cursor: int, acknowledged: list[str], timeout_s: float | None
) -> bytes:
    """Return the body of one session poll. `timeout_s`: None leaves the length of the poll to the gateway."""
    body: dict[str, Any] = {
        "target": {"type": "sampling_session", "sampling_session_id": sampling_session_id, "cloned_sampler_id": 0},
        "prev_cursor": cursor,
        "retrieved_request_ids": acknowledged,
    }
    if timeout_s is not None:
        body["timeout"] = timeout_s
    return orjson.dumps(body)
