"""The short way and httptools' way say the same of a target."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.http import head

KEYS = ("path", "raw_path", "query_string")


def placed(url: bytes) -> dict[str, Any]:
    return head.scope_of(b"GET", url, "1.1", [])


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (b"/api/v1/asample", ("/api/v1/asample", b"/api/v1/asample", b"")),
        (b"/a%2Fb?c=d%26", ("/a/b", b"/a%2Fb", b"c=d%26")),
        (b"http://host:1/a?b", ("/a", b"/a", b"b")),
        (b"/", ("/", b"/", b"")),
    ],
)
def test_targets(url: bytes, expected: tuple[str, bytes, bytes]) -> None:
    assert tuple(placed(url)[key] for key in KEYS) == expected


@given(st.text(alphabet="ab./-~_0", max_size=12).map(lambda text: b"/" + text.encode()))
def test_the_short_way_is_no_other_way(url: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        short = placed(url)
        patch.setattr(head, "_PLAIN", re.compile(rb"(?!)"))
        assert placed(url) == short
