"""Costs are compared in turns and as ratios, and a wrong result stops a measurement."""

from __future__ import annotations

import pytest

from benchmarks.tables import figures_table, markdown, shown_us
from benchmarks.turns import Case, Contender, Figure, Plan, WrongResult, each_time, figure, measure, rotated


async def test_contenders_take_turns_and_each_begins_a_round() -> None:
    seen: list[str] = []

    def contender(name: str) -> Contender:
        async def work(calls: int) -> None:
            seen.append(f"{name}{calls}")

        return Contender(name, work)

    figures = await measure(Case("thing", 20, [contender("a"), contender("b"), contender("c")]), 3)
    assert seen == ["a2", "b2", "c2", "a20", "b20", "c20", "b20", "c20", "a20", "c20", "a20", "b20"]
    assert [(each.case, each.contender, each.calls, each.rounds) for each in figures] == [
        ("thing", name, 20, 3) for name in "abc"
    ]
    assert figures[0].ratio is None


def test_a_ratio_is_the_median_of_the_rounds_own() -> None:
    """A round in which everything took ten times as long has the same ratio as the others."""
    case = Case("thing", 5, [])
    theirs = figure(case, "theirs", [20.0, 300.0, 40.0], [10.0, 100.0, 10.0])
    assert theirs == Figure("thing", "theirs", 5, 3, 20.0, 40.0, 3.0)


async def test_a_wrong_result_ends_the_measurement() -> None:
    def wrong() -> None:
        raise WrongResult("not the same")

    with pytest.raises(WrongResult, match="not the same"):
        await measure(Case("thing", 1, [Contender("ours", each_time(wrong))]), 1)


async def test_a_plain_function_is_called_so_many_times() -> None:
    calls: list[int] = []
    await each_time(lambda: calls.append(1))(7)
    assert len(calls) == 7


def test_the_order_rotates() -> None:
    assert [rotated(3, by) for by in range(4)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]


def test_a_quick_plan_makes_few_calls_and_one_at_least() -> None:
    assert (Plan().calls(6_000), Plan(quick=True).calls(6_000), Plan(quick=True).calls(3)) == (6_000, 120, 1)


@pytest.mark.parametrize(
    ("cost_us", "shown"),
    [(2.44, "2.4 us"), (173.3, "173 us"), (1_696.7, "1.70 ms"), (23_172.1, "23.2 ms"), (455_489.6, "455 ms")],
)
def test_costs_have_three_digits_and_a_unit(cost_us: float, shown: str) -> None:
    assert shown_us(cost_us) == shown


def test_tables_line_up() -> None:
    assert markdown(["a", "bb"], [["ccc", "d"]]) == "| a   | bb |\n| --- | -- |\n| ccc | d  |"
    table = figures_table(
        [Figure("thing", "ours", 1, 1, 1.0, 2.0, None), Figure("thing", "theirs", 1, 1, 3.0, 4.0, 2.5)]
    )
    assert len({len(line) for line in table.splitlines()}) == 1
    assert table.splitlines()[-1].split("|")[-2].strip() == "2.5"
