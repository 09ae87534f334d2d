"""A grid of words as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

# Characters that LaTeX gives a meaning, and signs that its fonts lack.
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "<": "$<$",
    ">": "$>$",
}


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of words. `rows` are as long as `header`."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.header) for row in self.rows), "a row is longer or shorter than the header"


def markdown(grid: Grid) -> str:
    """A pipe table, padded so that it can be read as text."""
    lines = [[_cell(each) for each in row] for row in (grid.header, *grid.rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(grid.header))]
    padded = [
        "| " + " | ".join(each.ljust(width) for each, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([padded[0], rule, *padded[1:]]) + "\n"


def csv_text(grid: Grid) -> str:
    """RFC 4180, with a plain line end."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([grid.header, *grid.rows])
    return stream.getvalue()


def latex(grid: Grid, caption: str, label: str) -> str:
    """A floating table in the manner of booktabs."""
    columns = "l" * len(grid.header)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escaped(caption)}}}",
        rf"\label{{tab:{label}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        _latex_row(grid.header),
        r"\midrule",
        *map(_latex_row, grid.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(_LATEX.get(each, each) for each in text)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())


def _latex_row(row: Sequence[str]) -> str:
    return " & ".join(map(escaped, row)) + r" \\"
