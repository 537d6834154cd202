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

    def allows(self, ours: float, theirs: float) -> bool:
        """Whether the budget is kept."""
        ratio = ours / theirs
        return ratio >= self.ratio if self.at_least else ratio <= self.ratio

    def stated(self, unit: str) -> str:
        """As the table has it; a ratio has no unit."""
        del unit
        return f"{'≥' if self.at_least else '≤'} {_short(self.ratio)}"

    def standing(self, ours: float, theirs: float, unit: str) -> str:
        """How ours stands to theirs, in the terms of the budget."""
        del unit
        return _short(ours / theirs)


@dataclass(frozen=True, slots=True)
class Margin:
    """How much more than what it is compared with a figure of ours may be.

    Attributes:
        most: Ours less theirs may be at most this, in the unit of the figure.
    """

    most: float

    def allows(self, ours: float, theirs: float) -> bool:
        """Whether the budget is kept."""
        return ours - theirs <= self.most

    def stated(self, unit: str) -> str:
        """As the table has it."""
        return f"≤ +{_short(self.most)} {unit}"

    def standing(self, ours: float, theirs: float, unit: str) -> str:
        """How ours stands to theirs, in the terms of the budget."""
        above = ours - theirs
        return f"{'-' if above < 0 else '+'}{_short(abs(above))} {unit}"


Budget = Limit | Margin


@dataclass(frozen=True, slots=True)
class Figure:
    """Something that is measured.

    Attributes:
        name: What a reader calls it.
        metric: Name under which every side reports it.
        unit: Unit of the table.
        against: What it is compared with: names of sides, and the budget if there is one.
        scale: Factor from the reported value to `unit`.
    """

    name: str
    metric: str
    unit: str
    against: dict[str, Budget | None]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """A figure beside one peer or floor.

    Attributes:
        theirs: `None` when it could not be measured; `missing` says why.
        ratio: Ours divided by theirs.
        standing: How ours stands to theirs, as the table has it.
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
    standing: str = ""

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
            self.standing,
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
