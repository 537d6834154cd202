"""A figure beside what it is compared with, and the table of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Kind = Literal["peer", "floor"]

COLUMNS = ("figure", "ours", "peer", "floor", "ratio", "budget")


@dataclass(frozen=True, slots=True)
class Limit:
    """How a figure of ours may stand to what it is compared with.

    Attributes:
        ratio: Ours divided by theirs may be at most this.
        at_least: It must be at least this instead: more is better.
    """

    ratio: float
    at_least: bool = False

    def allows(self, ratio: float) -> bool:
        """Whether the budget is kept."""
        return ratio >= self.ratio if self.at_least else ratio <= self.ratio

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {_short(self.ratio)}"


@dataclass(frozen=True, slots=True)
class Figure:
    """Something that is measured.

    Attributes:
        name: What a reader calls it.
        metric: Name under which every side reports it.
        unit: Unit of the table.
        against: What it is compared with: names of sides, and the limit if there is a budget.
        scale: Factor from the reported value to `unit`.
    """

    name: str
    metric: str
    unit: str
    against: dict[str, Limit | None]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """A figure beside one peer or floor.

    Attributes:
        theirs: `None` when it could not be measured; `missing` says why.
        ratio: Ours divided by theirs.
        kept: Whether the budget is kept; `None` if there is none, or nothing to compare with.
    """

    figure: str
    unit: str
    ours: float
    kind: Kind
    name: str
    theirs: float | None
    ratio: float | None
    budget: str
    kept: bool | None
    missing: str = ""

    def cells(self, *, first: bool) -> tuple[str, ...]:
        """What stands in the columns; a figure is named once."""
        value = f"{_short(self.theirs)} {self.unit}" if self.theirs is not None else self.missing
        theirs = f"{self.name}: {value}"
        verdict = {True: "", False: "  MISSED", None: ""}[self.kept]
        return (
            self.figure if first else "",
            f"{_short(self.ours)} {self.unit}" if first else "",
            theirs if self.kind == "peer" else "",
            theirs if self.kind == "floor" else "",
            f"{_short(self.ratio)}" if self.ratio is not None else "",
            f"{self.budget}{verdict}",
        )


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table that is aligned for a terminal."""
    lines: list[tuple[str, ...]] = [COLUMNS]
    previous = ""
    for row in rows:
        lines.append(row.cells(first=row.figure != previous))
        previous = row.figure
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(_line(line, widths) for line in lines)


def as_json(rows: Iterable[Row]) -> list[dict[str, object]]:
    """The rows as plain values."""
    return [asdict(row) for row in rows]


def _line(cells: Iterable[str], widths: Iterable[int]) -> str:
    return "| " + " | ".join(map(str.ljust, cells, widths)) + " |"


def _short(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
