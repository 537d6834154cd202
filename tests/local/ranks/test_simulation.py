"""A real controller with the world of more pods than a machine has."""

from __future__ import annotations

from benchmarks.programs.kubetorch_membership import PODS, membership
from benchmarks.programs.simulated_controller import LOST
from shared import WHOLE


def test_ranks_of_thousands_are_told_at_once_of_hundreds_that_are_lost() -> None:
    pods = PODS if WHOLE else LOST + 200
    measured = membership(pods, quiet=5.0 if WHOLE else 0.5)
    print(
        f"{pods} pods launched in {measured['launched']:.1f} s; {LOST} lost at once, which the "
        f"others know after {measured['lost'] * 1e3:.0f} ms; "
        f"{measured['peak'] / 1e6:.0f} MB at most, "
        f"{measured['quiet']:.0%} of a core for signs of life"
    )
    assert measured["lost"] < 60
    assert measured["peak"] < 1e9
