"""A status code for clients is chosen in workers/api/replies.py, except for what the HTTP edge refuses by itself."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

import pytest

from tests.unit.test_layout import modules, tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# Handlers may say 200, which is no choice.
SUCCESS: Final = 200
# The edge refuses these before a handler exists: a malformed or oversized head, and a request that does not arrive.
REFUSED_AT_THE_EDGE: Final = {
    "BAD_REQUEST",
    "REQUEST_HEADER_FIELDS_TOO_LARGE",
    "REQUEST_TIMEOUT",
    "REQUEST_URI_TOO_LONG",
}


def literal_statuses(tree: ast.Module) -> Iterator[int]:
    """Status codes written as numbers: the first argument of a ...Reply or ...Response, and every `status=`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            first = node.args[:1] if name.endswith(("Reply", "Response")) else []
            named = [keyword.value for keyword in node.keywords if keyword.arg in ("status", "status_code")]
            for value in (*first, *named):
                if isinstance(value, ast.Constant) and type(value.value) is int:
                    yield value.value


def named_statuses(tree: ast.Module) -> Iterator[str]:
    """Members of `HTTPStatus`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "HTTPStatus":
            yield node.attr


@pytest.mark.parametrize("room", ["workers", "shared"])
def test_only_replies_chooses_a_status(room: str) -> None:
    found = [
        f"{name} answers {status}"
        for name, path in modules(room)
        if name != "workers.api.replies"
        for status in {*literal_statuses(tree_of(path)), *named_statuses(tree_of(path))} - {SUCCESS}
        if not (name.startswith("shared.http.") and status in REFUSED_AT_THE_EDGE)
    ]
    assert not found


@pytest.mark.parametrize(
    ("code", "statuses"),
    [
        ("Reply(404, b'')", {404}),
        ("replies.FixedReply(503, b'')", {503}),
        ("answer(status=500)", {500}),
        ("HTTPStatus.NOT_FOUND", {"NOT_FOUND"}),
        ("Reply(status_of(error), b'')", set()),
        ("retry(500)", set()),
    ],
)
def test_a_chosen_status_is_found(code: str, statuses: set[int | str]) -> None:
    tree = ast.parse(code)
    assert {*literal_statuses(tree), *named_statuses(tree)} == statuses
