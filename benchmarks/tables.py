"""Write results as Markdown tables, which read well as plain text too."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.turns import Figure


def say(text: str) -> None:
    """Print at once, so that a long run shows its progress."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    padded = ([cell.ljust(width) for cell, width in zip(cells, widths, strict=True)] for cells in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)


def figures_table(figures: Sequence[Figure]) -> str:
    header = ("what", "how", "least", "median", "times ours")
    return markdown(header, [_figure_row(figure) for figure in figures])


def _figure_row(figure: Figure) -> list[str]:
    ratio = f"{figure.ratio:,.1f}" if figure.ratio is not None else ""
    return [figure.case, figure.contender, shown_us(figure.least_us), shown_us(figure.median_us), ratio]


def shown_us(cost_us: float) -> str:
    """Format a cost with three significant digits and a unit."""
    return (
        f"{cost_us:.1f} us" if cost_us < 100 else f"{cost_us:.0f} us" if cost_us < 1_000 else _shown_ms(cost_us / 1e3)
    )


def _shown_ms(cost_ms: float) -> str:
    return f"{cost_ms:.2f} ms" if cost_ms < 10 else f"{cost_ms:.1f} ms" if cost_ms < 100 else f"{cost_ms:.0f} ms"
