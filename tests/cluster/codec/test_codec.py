"""On a real cluster: values arrive as they were sent, in an image that has nothing but Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.conftest import Installed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROGRAM = """
import dataclasses, datetime, decimal, enum
import kubetorch as kt

class Color(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Point:
    x: object
    y: tuple = ()

def echo(value):
    return value

VALUE = {
    1: {2, 3},
    None: float("inf"),
    (1, "a"): Point(Color.RED, (1, 2)),
    "b": [b"x", 2**20000],
    "d": [datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc), decimal.Decimal("1.10")],
}

if __name__ == "__main__":
    import numpy
    echo_there = kt.fn(echo).to(kt.Compute(cpus="10m", launch_timeout=150))
    assert echo_there(VALUE) == VALUE
    print("exact", echo_there.spawn({1: (2,)}).get())
    print(type(echo_there(numpy.float64(1.5))).__name__)
    try:
        echo_there(numpy.ones(3))
    except kt.SerializationError as error:
        print(error.message)
    echo_there.teardown()
"""


def test_values_arrive_as_they_were_sent(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    # Before these come lines of the deploy.
    exact, plain, missing = installed.python(PROGRAM, tmp_path, timeout=250).splitlines()[-3:]
    assert exact == "exact {1: [2]}"
    assert plain == "float"
    assert missing.startswith("a NumPy array arrived, and numpy cannot be imported here")
