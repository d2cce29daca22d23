"""What may be published as the list of upstreams."""

from __future__ import annotations

import pytest

from gateway.admin.upstreams import read_list


def test_urls_are_put_into_their_one_form_and_named_once() -> None:
    assert read_list(b'["http://a:1/", "https://b/router", "http://a:1"]') == ("http://a:1", "https://b/router")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "JSON list"),
        (b"{}", "JSON list"),
        (b'"http://a"', "JSON list"),
        (b"[1]", "JSON list"),
        (b'["\xff"]', "JSON list"),
        (b"[]", "DELETE"),
        (b'["a:8000"]', "base URL"),
        (b'["file:///etc/passwd"]', "base URL"),
        (b'["http://a/v1"]', "without /v1"),
        (b'["http://a?x=1"]', "no query"),
        (b'["http://a", "http:// b"]', "http:// b"),
    ],
)
def test_what_is_no_list_of_base_urls_is_refused_in_words(body: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_list(body)


def test_a_password_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="credentials") as refused:
        read_list(b'["http://user:secret@a"]')
    assert "secret" not in str(refused.value)
