"""How calls of a function are put together into batches, as `@kt.batched` declares it."""

from __future__ import annotations

import math

from kubetorch.errors import SpecError
from kubetorch.lib.frozen_values import FrozenValue

#: The attribute of a function that has its `BatchSpec`.
MARKER = "__kubetorch_batched__"
MOST_ITEMS = 10_000
#: A call waits at most so many seconds for others.
LONGEST_WAIT_SECONDS = 60.0


class BatchSpec(FrozenValue):
    """Which calls of one function run together.

    Attributes:
        max_size: Calls that run together at most.
        wait: Seconds that a call waits for others at most.
    """

    max_size: int
    wait: float

    def __post_init__(self) -> None:
        size: object = self.max_size
        if type(size) is not int or not 1 <= size <= MOST_ITEMS:
            raise SpecError(
                f"max_size is {size!r}; it must be a whole number from 1 to {MOST_ITEMS}",
                hint="@kt.batched(max_size=32) runs up to 32 calls together",
            )
        wait: object = self.wait
        is_number = type(wait) in (int, float) and math.isfinite(wait)  # type: ignore[arg-type]  # one
        if not is_number or not 0 <= wait <= LONGEST_WAIT_SECONDS:  # type: ignore[operator]  # one
            raise SpecError(
                f"wait is {wait!r}; it must be a number of seconds from 0 to "
                f"{LONGEST_WAIT_SECONDS:g}",
                hint="@kt.batched(wait=0.02) lets a call wait 20 ms for others",
            )
