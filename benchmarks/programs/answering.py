"""How a program answers the benchmark that started it.

Requests are lines on standard input, `["name", {parameters}]`; answers are lines on the file
descriptor that is the first argument of the program. The end of standard input ends the program.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping

Answer = Callable[..., Mapping[str, float]]


def answer(measurements: Mapping[str, Answer]) -> None:
    """Answer requests, by their name, until there are no more."""
    with os.fdopen(int(sys.argv[1]), "w") as replies:
        for line in sys.stdin:
            name, parameters = json.loads(line)
            values = measurements[name](**parameters) if name != "ready" else {}
            replies.write(json.dumps(values) + "\n")
            replies.flush()


def arguments() -> list[str]:
    """The command line of the program."""
    return sys.argv[2:]
