"""A figure beside what it is compared with, and the table of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        difference: It is how much one measurement is above another, so it may be zero or less;
            any other figure that is has not been measured.
    """

    name: str
    metric: str
    unit: str
    against: dict[str, Budget | None]
    scale: float = 1.0
    difference: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A figure beside one peer or floor.

    Attributes:
        ours, theirs: `None` when it could not be measured; `missing` says why.
        ratio: Ours divided by theirs.
        standing: How ours stands to theirs, as the table has it.
        kept: Whether the budget is kept; `None` if there is none, or nothing to compare.
    """

    figure: str
    unit: str
    ours: float | None
    kind: Kind
    name: str
    theirs: float | None
    ratio: float | None
    budget: str
    kept: bool | None
    missing: str = ""
    standing: str = ""

    @property
    def is_unchecked(self) -> bool:
        """Whether there is a budget, and nothing that says whether it is kept."""
        return bool(self.budget) and self.kept is None

    def cells(self, *, first: bool) -> tuple[str, ...]:
        """What stands in the columns; a figure is named once."""
        theirs = f"{self.name}: {self._value(self.theirs)}"
        verdict = {True: "", False: "  MISSED", None: "  NOT CHECKED" if self.budget else ""}
        return (
            self.figure if first else "",
            self._value(self.ours) if first else "",
            theirs if self.kind == "peer" else "",
            theirs if self.kind == "floor" else "",
            self.standing,
            f"{self.budget}{verdict[self.kept]}",
        )

    def _value(self, value: float | None) -> str:
        return self.missing or "not measured" if value is None else f"{_short(value)} {self.unit}"


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


# ------------------------------------------------------------------------------------- groups


class GroupsFailedError(Exception):
    """Some groups of figures could not be measured; `rows` are those of the others."""

    def __init__(self, failed: Sequence[str], rows: list[Row]) -> None:
        super().__init__(f"could not be measured: {', '.join(failed)}")
        self.rows = rows


def measured(groups: Mapping[str, Callable[[], Iterable[Row]]]) -> list[Row]:
    """The rows of all groups, each of which is measured, whatever becomes of the others."""
    rows: list[Row] = []
    failed = []
    for name, group in groups.items():
        try:
            rows.extend(group())
        except Exception:  # noqa: BLE001  # of the others the figures are wanted
            traceback.print_exc()
            failed.append(name)
    if failed:
        raise GroupsFailedError(failed, rows)
    return rows
