"""`python -m benchmarks NAME...`: run benchmarks, print their tables, check their budgets."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from benchmarks import figures
from benchmarks.figures import GroupsFailedError, Row
from benchmarks.venvs import UnavailableError

#: Each is a module of this package with `run(rounds) -> list[Row]`.
LOCAL = (
    *("calls", "map", "bulk", "reload", "startup", "logs", "faults", "manifests", "image"),
    *("sessions", "ranks", "scale", "store"),
)
#: These need a cluster.
CLUSTER = ("cluster", "knative")
#: Stands for all that need no cluster.
ALL = "all"
NAMES = (*LOCAL, *CLUSTER, ALL)
# 5: fewer medians say little on a machine that also does other things.
ROUNDS = 5


#: Gives the rows of a benchmark by its name, after so many rounds.
Run = Callable[[str, int], list[Row]]


def run(name: str, rounds: int) -> list[Row]:
    """Measure."""
    rows: list[Row] = importlib.import_module(f"benchmarks.{name}").run(rounds)
    return rows


def main(arguments: Sequence[str] | None = None, run: Run = run) -> int:
    """Run what the command line names.

    The exit status is 1 if something could not be measured at all, and with `--check` if a budget
    was missed, or could not be checked because what it is compared with was not there.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--check", action="store_true", help="exit 1 if a budget is not kept")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    options = parser.parse_args(arguments)
    if options.check and options.rounds < ROUNDS:
        parser.error(f"--check needs {ROUNDS} rounds or more")
    # Installed packages have byte code; a checkout gets it in the first round, if it may.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # So that what was started is stopped.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    rows_by_name: dict[str, list[Row]] = {}
    unavailable = False
    for name in _expanded(options.names):
        try:
            rows_by_name[name] = run(name, options.rounds)
        except UnavailableError as error:
            unavailable = True
            print(f"{name} cannot be measured here: {error}", file=sys.stderr)
            continue
        except GroupsFailedError as error:
            unavailable = True
            print(f"of {name} {error}", file=sys.stderr)
            rows_by_name[name] = error.rows
        if not options.json:
            print(f"{name}\n\n{figures.table(rows_by_name[name])}\n", flush=True)
    if options.json:
        print(
            json.dumps(
                {name: figures.as_json(rows) for name, rows in rows_by_name.items()}, indent=2
            )
        )
    return 1 if unavailable or (not _keeps_budgets(rows_by_name) and options.check) else 0


def _expanded(names: Sequence[str]) -> list[str]:
    """Each benchmark once."""
    return list(
        dict.fromkeys(
            expanded_name for name in names for expanded_name in (LOCAL if name == ALL else (name,))
        )
    )


def _keeps_budgets(rows_by_name: Mapping[str, Sequence[Row]]) -> bool:
    """Whether every budget is kept; says which are not, and which nothing could be said of."""
    rows = [row for benchmark in rows_by_name.values() for row in benchmark]
    missed = dict.fromkeys(row.figure for row in rows if row.kept is False)
    unchecked = dict.fromkeys(f"{row.figure} ({row.name})" for row in rows if row.is_unchecked)
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    if unchecked:
        print(f"not checked: {', '.join(unchecked)}", file=sys.stderr)
    return not missed and not unchecked


if __name__ == "__main__":
    raise SystemExit(main())
