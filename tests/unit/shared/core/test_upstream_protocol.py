from __future__ import annotations

import pytest

from shared.core.upstream_protocol import ProtocolChoice, UpstreamProtocol, has_generate


@pytest.mark.parametrize(
    ("statuses", "found"),
    [
        ((400, 422), True),
        # vLLM without --enable-scale-out, older ones, routers that do not know it, and what takes anything.
        ((200, 403, 404, 405, 501), False),
        # Nothing about the endpoint: no key, busy, broken, elsewhere.
        ((401, 408, 413, 429, 500, 502, 503, 504, 302, 204), None),
    ],
)
def test_what_an_answer_to_nothing_tells(statuses: tuple[int, ...], found: bool | None) -> None:
    assert {has_generate(status) for status in statuses} == {found}


def test_every_protocol_can_be_chosen_and_has_a_path() -> None:
    assert {choice.value for choice in ProtocolChoice} == {one.value for one in UpstreamProtocol} | {"auto"}
    assert [one.path for one in UpstreamProtocol] == ["/v1/completions", "/inference/v1/generate"]
