"""What travels on and what stays: headers both ways, paths, redirects."""

from __future__ import annotations

import pytest

from shared.wire import passing

FROM_SDK = {
    b"x-api-key": b"tml-secret",
    b"accept": b"application/x-protobuf",
    b"accept-encoding": b"gzip, zstd",
    b"content-type": b"application/x-protobuf",
    b"content-encoding": b"zstd",
    b"content-length": b"12",
    b"user-agent": b"AsyncTinker/Python 0.38.0",
    b"x-stainless-retry-count": b"0",
    b"x-idempotency-key": b"stainless-python-retry-1",
    b"x-tinker-request-type": b"OptimStep",
    b"x-sdk-version": b"0.38.0",
    b"x-request-id": b"r",
    b"traceparent": b"00-1-2-01",
}
# Of this connection, of this account, of the way to us, or forged.
STAYS = {
    b"host": b"public",
    b"connection": b"keep-alive, x-tinker-evil",
    b"keep-alive": b"timeout=5",
    b"transfer-encoding": b"chunked",
    b"te": b"trailers",
    b"upgrade": b"websocket",
    b"expect": b"100-continue",
    b"proxy-authorization": b"Basic x",
    b"cookie": b"session=1",
    b"authorization": b"Bearer tml-secret",
    b"cf-access-client-secret": b"s",
    b"x-forwarded-for": b"10.0.0.1",
    b"forwarded": b"for=10.0.0.1",
    b"x-real-ip": b"10.0.0.1",
}


def test_a_trainer_gets_what_the_sdk_says_and_nothing_else() -> None:
    kept = dict(passing.to_trainer([*FROM_SDK.items(), *STAYS.items()]))
    assert kept == {name: value for name, value in FROM_SDK.items() if name != b"x-api-key"}


def test_an_engine_gets_even_less() -> None:
    kept = dict(passing.to_openai([*FROM_SDK.items(), *STAYS.items()]))
    assert set(kept) == {b"accept", b"content-type", b"user-agent", b"x-request-id", b"traceparent"}


def test_a_value_that_is_no_ascii_stays() -> None:
    assert passing.to_trainer([(b"user-agent", "ü".encode())]) == []
    assert passing.api_key([(b"x-api-key", "ü".encode())]) is None


def test_the_key_is_found() -> None:
    assert passing.api_key([(b"accept", b"*/*"), (b"x-api-key", b"tml-a")]) == "tml-a"
    assert passing.api_key([]) is None


def test_a_client_gets_no_cookies_and_nothing_of_the_other_connection() -> None:
    headers = [
        (b"Content-Type", b"application/json"),
        (b"Content-Encoding", b"gzip"),
        (b"Content-Length", b"3"),
        (b"Location", b"https://storage/x"),
        (b"Retry-After", b"3"),
        (b"X-Should-Retry", b"false"),
        (b"WWW-Authenticate", b'Bearer error="invalid_token"'),
        (b"Set-Cookie", b"a=1"),
        (b"Server", b"uvicorn"),
        (b"Connection", b"close"),
        (b"Keep-Alive", b"timeout=5"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Trailer", b"x"),
        (b"Access-Control-Allow-Origin", b"*"),
    ]
    kept = passing.to_client(headers)
    assert kept == [(name.lower(), value) for name, value in headers[:7]]
    assert passing.without(kept, b"content-length", b"location")[2] == (b"retry-after", b"3")


@pytest.mark.parametrize(
    ("path", "query", "plain"),
    [
        (b"/api/v1/training_runs/a:train:0/checkpoints/weights/1", b"", True),
        (b"/api/v1/x%20y", b"limit=3&q=a/b%2e", True),
        (b"/api/v1/...", b"", True),
        (b"/api/v1/a.b", b"", True),
        (b"/api/v1/../admin", b"", False),
        (b"/api/v1/..", b"", False),
        (b"/api/v1/./x", b"", False),
        (b"/api/v1/%2e%2E/admin", b"", False),
        (b"/api/v1/.%2e/admin", b"", False),
        (b"/api/v1/x%2f..%2fadmin", b"", False),
        (b"/api/v1/..\\admin", b"", False),
        (b"/api/v1/%5c..%5cadmin", b"", False),
        (b"/api/v1/\xc3\xbc", b"", False),
        (b"/api/v1/a b", b"", False),
        (b"/api/v1/a", b"x#y", False),
        (b"/api/v1/a", b"x\r\nHost: y", False),
        (b"*", b"", False),
    ],
)
def test_only_a_plain_target_means_the_same_elsewhere(path: bytes, query: bytes, plain: bool) -> None:
    assert passing.is_plain_target(path, query) is plain


@pytest.mark.parametrize(
    ("location", "seen"),
    [
        (b"https://storage.example/signed?x=1", b"https://storage.example/signed?x=1"),
        (b"/api/v1/other", b"/api/v1/other"),
        (b"http://trainer:8000/base/api/v1/x?y=1", b"/api/v1/x?y=1"),
        (b"http://trainer:8000/base", b"/"),
        (b"http://trainer:8000/base?y", b"?y"),
        (b"http://trainer:8000/basement", b"http://trainer:8000/basement"),
    ],
)
def test_a_redirect_within_the_server_is_one_within_us(location: bytes, seen: bytes) -> None:
    assert passing.redirect_for_client(location, "http://trainer:8000/base") == seen
