from __future__ import annotations

import pytest

from gateway.settings import quantities as q


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), ("2.5", 2.5), ("30s", 30), ("500ms", 0.5), ("5m", 300), ("1h", 3600), ("2 d", 172_800)],
)
def test_durations(text: str, seconds: float) -> None:
    assert q.duration_s()(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "soon", "1e3", "5 minutes", "nan", "inf", "99999999999", "1" * 400])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"give seconds from 0\.001 to 2592000"):
        q.duration_s()(text)


def test_a_duration_may_have_other_bounds() -> None:
    assert q.duration_s(at_least=0)("0") == 0
    with pytest.raises(ValueError, match=r"from 0\.001 to 30 "):
        q.duration_s(at_most=30)("31")


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 1 << 20), ("64MiB", 64 << 20), ("1GiB", 1 << 30), ("1.5 GiB", 3 << 29), ("500MB", 500_000_000)],
)
def test_sizes(text: str, size: int) -> None:
    assert q.size_bytes()(text) == size


@pytest.mark.parametrize("text", ["0", "-1", "1 parsec", "", "GiB", "9" * 30])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="give a size of at least 1 bytes"):
        q.size_bytes()(text)


@pytest.mark.parametrize("text", ["-1", "11", "1.5", "x", "", "1_0", "9" * 30])
def test_whole_numbers_of_a_range(text: str) -> None:
    assert q.whole(0, 10)("10") == 10
    with pytest.raises(ValueError, match="give a whole number from 0 to 10"):
        q.whole(0, 10)(text)


def test_choices_and_switches() -> None:
    assert q.choice("auto", "off")("AUTO") == "auto"
    with pytest.raises(ValueError, match="allowed are auto, off"):
        q.choice("auto", "off")("on")
    assert [q.switch(text) for text in ("true", "Yes", "on", "1", "false", "no", "off", "0")] == [True] * 4 + [
        False
    ] * 4
    with pytest.raises(ValueError, match="allowed are true and false"):
        q.switch("maybe")


def test_bytes_for_people() -> None:
    assert [q.human_bytes(size) for size in (0, 1023, 1536, 3 << 29, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.5 GiB",
        "5.0 TiB",
    ]
