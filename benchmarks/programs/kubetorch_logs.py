"""How long a line takes from `print` in a pod to the standard output of the caller.

kubetorch_logs PROJECT
"""

from __future__ import annotations

import importlib
import sys

import kubetorch as kt
from benchmarks.programs import driving
from benchmarks.programs.answering import answer, arguments
from benchmarks.programs.output import watched


def main() -> None:
    """Deploy, then answer."""
    [project] = arguments()
    sys.path.insert(0, project)
    with watched() as output:
        tick = kt.fn(importlib.import_module("service").tick).to(kt.Compute(cpus="0.1"))

        def lines(count: int, interval: float) -> dict[str, float]:
            output.take()
            tick(count, interval)
            # The clock is the machine's: what one process prints, another may subtract.
            ticks = [(came, line.split()[-1]) for came, line in output.take() if "tick" in line]
            assert len(ticks) == count, f"{len(ticks)} of {count} lines came"
            return driving.percentiles([came - float(printed) for came, printed in ticks])

        answer({"lines": lines})
        tick.teardown()


if __name__ == "__main__":
    main()
