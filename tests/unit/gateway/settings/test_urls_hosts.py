"""Hosts that no name service can be asked for are refused where they are given, and not by each worker that tries."""

from __future__ import annotations

import pytest

from gateway.settings.urls import upstream_url


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "\u00fc" * 64, "a b", "\0", "\x7f"])
def test_a_host_that_cannot_be_asked_for(host: str) -> None:
    with pytest.raises(ValueError, match="give the base URL"):
        upstream_url(f"http://{host}:8000")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "a" * 63, "b\u00fccher.example", "vllm_0.pool", "a.b."])
def test_a_host_that_can(host: str) -> None:
    assert upstream_url(f"http://{host}:8000/") == f"http://{host}:8000"
