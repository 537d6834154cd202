"""`python -m benchmarks NAME...`: run benchmarks, print their tables, check their budgets."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence

from benchmarks import figures
from benchmarks.figures import Row
from benchmarks.venvs import UnavailableError

#: Each is a module of this package with `run(rounds) -> list[Row]`.
NAMES = (
    *("calls", "bulk", "reload", "startup", "logs", "faults", "manifests", "image"),
    *("sessions", "cluster"),
)
# 5: fewer medians say little on a machine that also does other things.
ROUNDS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names; the exit status is 1 if a budget was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--check", action="store_true", help="exit 1 if a budget is missed")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    options = parser.parse_args(arguments)
    if options.check and options.rounds < ROUNDS:
        parser.error(f"--check needs {ROUNDS} rounds or more")
    # Installed packages have byte code; a checkout gets it in the first round, if it may.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # So that what was started is stopped.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    found: dict[str, list[Row]] = {}
    unavailable = False
    for name in options.names:
        try:
            found[name] = importlib.import_module(f"benchmarks.{name}").run(options.rounds)
        except UnavailableError as error:
            unavailable = True
            print(f"{name} cannot be measured here: {error}", file=sys.stderr)
            continue
        if not options.json:
            print(f"{name}\n\n{figures.table(found[name])}\n", flush=True)
    if options.json:
        print(json.dumps({name: figures.as_json(rows) for name, rows in found.items()}, indent=2))
    missed = [row.figure for rows in found.values() for row in rows if row.kept is False]
    if missed:
        print(f"missed: {', '.join(dict.fromkeys(missed))}", file=sys.stderr)
    return 1 if unavailable or (options.check and missed) else 0


if __name__ == "__main__":
    raise SystemExit(main())
