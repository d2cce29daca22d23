"""Findings for people: Markdown, which reads as plain text too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.turns import Figure


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are as wide as their widest cell."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    shown = [_line(line, widths) for line in lines]
    return "\n".join([shown[0], _line(["-" * width for width in widths], widths), *shown[1:]])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def figures_table(figures: Sequence[Figure]) -> str:
    header = ("what", "how", "least", "median", "times ours")
    return markdown(header, [_figure_row(figure) for figure in figures])


def _figure_row(figure: Figure) -> list[str]:
    ratio = f"{figure.ratio:,.1f}" if figure.ratio is not None else ""
    return [figure.case, figure.contender, shown_us(figure.least_us), shown_us(figure.median_us), ratio]


def shown_us(cost_us: float) -> str:
    """Three digits that count, with a unit."""
    return (
        f"{cost_us:.1f} us" if cost_us < 100 else f"{cost_us:.0f} us" if cost_us < 1_000 else _shown_ms(cost_us / 1e3)
    )


def _shown_ms(cost_ms: float) -> str:
    return f"{cost_ms:.2f} ms" if cost_ms < 10 else f"{cost_ms:.1f} ms" if cost_ms < 100 else f"{cost_ms:.0f} ms"
