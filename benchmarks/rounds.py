"""Sides that are measured in turns."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Literal

from benchmarks.figures import Figure, Kind, Limit, Row
from benchmarks.venvs import UnavailableError

#: One measurement of one side: values by metric.
Measure = Callable[[], Mapping[str, float]]
OURS = "ours"
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


def compare(figures: Sequence[Figure], sides: Sequence[Side], rounds: int) -> list[Row]:
    """Measure all sides, `rounds` times in turns, and compare the medians.

    Each round begins with another side, so that none of them always runs after the same one.
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
        names = list(measures)
        for number in range(rounds):
            first = number % len(names)
            for name in [*names[first:], *names[:first]]:
                _show(f"round {number + 1}/{rounds}: {name}")
                for metric, value in measures[name]().items():
                    values[name][metric].append(value)
    _show("")
    medians = {
        name: {metric: statistics.median(found) for metric, found in of_side.items()}
        for name, of_side in values.items()
    }
    kinds = {side.name: side.kind for side in sides}
    return [row for figure in figures for row in _rows(figure, medians, missing, kinds)]


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
    ours = medians[OURS][figure.metric] * figure.scale
    rows = []
    for name, budget in figure.against.items():
        kind = kinds[name]
        assert kind != "ours"
        measured = medians.get(name, {}).get(figure.metric)
        theirs = None if measured is None else measured * figure.scale
        compared = theirs or None
        terms = budget or _RATIO
        rows.append(
            Row(
                figure=figure.name,
                unit=figure.unit,
                ours=ours,
                kind=kind,
                name=name,
                theirs=theirs,
                ratio=ours / compared if compared else None,
                budget=budget.stated(figure.unit) if budget else "",
                kept=budget.allows(ours, compared) if budget and compared else None,
                missing=missing.get(name, ""),
                standing=terms.standing(ours, compared, figure.unit) if compared else "",
            )
        )
    return rows
