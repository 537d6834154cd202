"""Sides that are measured in turns."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.figures import Figure, Kind, Limit, Row
from benchmarks.venvs import UnavailableError

#: One measurement of one side: values by metric.
Measure = Callable[[], Mapping[str, float]]
OURS = "ours"
#: What budgets are compared with that say the same of every machine.
STATED = "as stated"
#: In what terms sides are compared that have no budget.
_RATIO = Limit(1.0)


@dataclass(frozen=True, slots=True)
class Side:
    """One of those that are compared.

    Attributes:
        name: `ours`, or what the table calls it.
        start: Starts its processes, and gives what measures it; raises `UnavailableError` if it
            cannot be had here.
    """

    name: str
    kind: Kind | Literal["ours"]
    start: Callable[[], AbstractContextManager[Measure]]


def stated(values: Mapping[str, float]) -> Side:
    """What budgets say, for those that are no ratios to something else."""
    return Side(STATED, "floor", lambda: nullcontext(lambda: values))


def compare(figures: Sequence[Figure], sides: Sequence[Side], rounds: int) -> list[Row]:
    """Measure all sides, `rounds` times in turns, and compare the medians.

    Where ours cannot be had, nothing is measured: there is nothing to compare.
    """
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        measures: dict[str, Measure] = {}
        for side in sides:
            try:
                measures[side.name] = stack.enter_context(side.start())
            except UnavailableError as error:
                missing[side.name] = str(error)
        names = list(measures) if OURS in measures else []
        for number in range(rounds):
            for name in _turns(names, number):
                _show(f"round {number + 1}/{rounds}: {name}")
                for metric, value in measures[name]().items():
                    values[name][metric].append(value)
    _show("")
    medians = {
        name: {metric: statistics.median(measured) for metric, measured in of_side.items()}
        for name, of_side in values.items()
    }
    kinds = {side.name: side.kind for side in sides}
    return [row for figure in figures for row in _rows(figure, medians, missing, kinds)]


def _turns(names: Sequence[str], number: int) -> list[str]:
    """The sides of a round in their order.

    Each round begins with another one, and every second one goes backwards, so that none of them
    always runs after the same one.
    """
    count, step = len(names), -1 if number % 2 else 1
    return [names[(number + step * turn) % count] for turn in range(count)]


def _show(text: str) -> None:
    """Say on a terminal, in one line, what is being done."""
    if sys.stderr.isatty():
        print(text, end="\033[K\r", file=sys.stderr, flush=True)


def _rows(
    figure: Figure,
    medians: Mapping[str, Mapping[str, float]],
    missing: Mapping[str, str],
    kinds: Mapping[str, Kind | Literal["ours"]],
) -> list[Row]:
    ours = _median(figure, medians, OURS)
    rows = []
    for name, budget in figure.against.items():
        kind = kinds[name]
        assert kind != "ours"
        theirs = _median(figure, medians, name)
        row = Row(
            figure=figure.name,
            unit=figure.unit,
            ours=ours,
            kind=kind,
            name=name,
            theirs=theirs,
            ratio=None,
            budget=budget.stated(figure.unit) if budget else "",
            kept=None,
            missing=missing.get(OURS) or missing.get(name, ""),
        )
        # A size or time of zero or less is none: nothing was found that could be measured.
        if ours is not None and theirs and theirs > 0 and (figure.difference or ours > 0):
            row = replace(
                row,
                ratio=ours / theirs,
                kept=budget.allows(ours, theirs) if budget else None,
                standing=(budget or _RATIO).standing(ours, theirs, figure.unit),
            )
        rows.append(row)
    return rows


def _median(figure: Figure, medians: Mapping[str, Mapping[str, float]], name: str) -> float | None:
    measured = medians.get(name, {}).get(figure.metric)
    return None if measured is None else measured * figure.scale
