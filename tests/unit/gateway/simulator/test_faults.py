"""The requests to which a scripted fault applies."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.simulator.faults import KINDS, choose, read_rules


def befallen(rules: Any, *requests: tuple[str, str, str]) -> list[str | None]:
    read = read_rules(rules)
    found = (choose(read, *request) for request in requests)
    return [fault.kind if fault else None for fault in found]


ANY = ("/v1/completions", "tiny", "s-a1")


def test_a_rule_without_a_number_stands() -> None:
    assert befallen([{"kind": "hang"}], ANY, ANY, ANY) == ["hang"] * 3


def test_only_the_next_n_are_befallen() -> None:
    assert befallen([{"kind": "hang", "next": 2}], ANY, ANY, ANY) == ["hang", "hang", None]


@pytest.mark.parametrize(("fraction", "hit"), [(0.5, 50), (0.1, 10), (0.25, 25), (1.0, 100), (0.75, 75)])
def test_a_fraction_is_spread_evenly(fraction: float, hit: int) -> None:
    kinds = befallen([{"kind": "hang", "fraction": fraction}], *[ANY] * 100)
    assert kinds.count("hang") == pytest.approx(hit, abs=1)
    half = kinds[:50].count("hang")
    assert half == pytest.approx(hit / 2, abs=1)


def test_a_fraction_of_the_next_n() -> None:
    assert befallen([{"kind": "hang", "fraction": 0.5, "next": 1}], *[ANY] * 4) == [None, "hang", None, None]


@pytest.mark.parametrize(
    ("match", "hit"),
    [
        ({"path": "/v1/completions"}, True),
        ({"path": "/inference/v1/generate"}, False),
        ({"model": "tiny"}, True),
        ({"model": "tin"}, False),
        ({"request_id_prefix": "s-"}, True),
        ({"request_id_prefix": "t-"}, False),
        ({"model": "tiny", "request_id_prefix": "t-"}, False),
    ],
    ids=repr,
)
def test_all_that_a_rule_matches_must_match(match: dict[str, str], hit: bool) -> None:
    kind = "hang" if hit else None
    assert befallen([{"match": match, "do": {"kind": "hang"}}], ANY) == [kind]
    assert befallen([{"kind": "hang", **match}], ANY) == [kind]


def test_a_request_that_does_not_match_spends_nothing() -> None:
    other = ("/v1/completions", "other", "s-a1")
    assert befallen([{"kind": "hang", "next": 1, "model": "tiny"}], other, ANY, ANY) == [None, "hang", None]


def test_the_first_rule_wins_and_the_next_follows_when_it_is_spent() -> None:
    rules = [{"kind": "hang", "next": 1}, {"kind": "html", "next": 1}]
    assert befallen(rules, ANY, ANY, ANY) == ["hang", "html", None]


def test_options_may_stand_beside_the_kind_or_under_do() -> None:
    wanted = {"status": 503, "body": "busy", "delay_s": 0.5}
    for rule in ({"kind": "status", **wanted, "next": 1}, {"do": {"kind": "status", **wanted}, "next": 1}):
        (read,) = read_rules({"faults": [rule]})
        assert read.fault.options == wanted
        assert read.fault.delay_s == 0.5


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ({}, "list"),
        ("hang", "list"),
        (["hang"], "object"),
        ([{"kind": "explode"}], "explode"),
        ([{}], "None"),
        ([{"kind": "hang", "do": 1}], "do"),
        ([{"kind": "hang", "match": []}], "match"),
        ([{"kind": "hang", "next": "2"}], "next"),
        ([{"kind": "hang", "fraction": 0}], "fraction"),
        ([{"kind": "hang", "fraction": "x"}], "fraction"),
    ],
    ids=repr,
)
def test_what_is_not_understood_is_named(rules: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_rules(rules)


def test_all_kinds_are_explained() -> None:
    import gateway.simulator.faults as module

    assert module.__doc__ is not None
    assert [kind for kind in sorted(KINDS) if kind not in module.__doc__] == []
