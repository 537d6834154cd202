"""How long deploys with an image take.

kubetorch_image PROJECT WHEELS
"""

from __future__ import annotations

import importlib
import itertools
import sys

import kubetorch as kt
from benchmarks.programs import driving
from benchmarks.programs.answering import answer, arguments


def main() -> None:
    """Deploy, then answer."""
    project, wheels = arguments()
    sys.path.insert(0, project)
    function = importlib.import_module("service").tick
    names = itertools.count()

    def image(*requirements: str) -> kt.Image:
        offline_image = kt.Image().set_env_vars({"UV_FIND_LINKS": wheels, "UV_OFFLINE": "1"})
        return offline_image.pip_install(list(requirements))

    def new(new_image: kt.Image | None) -> float:
        """The first deploy of another service."""
        handle = kt.fn(function, name=f"other{next(names)}")
        took = driving.clock(lambda: handle.to(kt.Compute(cpus="0.1", image=new_image)))
        handle.teardown()
        return took

    first = image("tiny0")
    compute = kt.Compute(cpus="0.1", image=first)
    kt.fn(function).to(compute)
    new(None)

    def deploys(number: int) -> dict[str, float]:
        unchanged = driving.median(lambda: kt.fn(function).to(compute), 5)
        first.pip_install(f"tiny{number}")
        added = driving.clock(lambda: kt.fn(function).to(compute))
        cached = sorted(new(image("tiny0")) - new(None) for _ in range(3))[1]
        return {"unchanged": unchanged, "added": added, "cached": cached}

    answer({"deploys": deploys})
    kt.fn(function).to(compute).teardown()


if __name__ == "__main__":
    main()
