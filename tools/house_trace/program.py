"""The program that `tools/house.py` traces: a deploy, an edit, calls."""

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def double(number: int) -> int:
    """The user's function."""
    return 2 * number


def _main() -> None:
    import kubetorch as kt  # noqa: PLC0415  # pods load this module, too

    with Path(sys.argv[1]).open("r+b") as file:
        window = mmap.mmap(file.fileno(), 1)

    @contextmanager
    def opened(number: int) -> Iterator[None]:
        window[0] = number
        try:
            yield
        finally:
            window[0] = 0

    with opened(1):
        kt.fn(double).to(kt.Compute(cpus="0.1"))
    program = Path(__file__)
    program.write_text(program.read_text() + "\nEDITED = True\n")
    with opened(2):
        remote = kt.fn(double).to(kt.Compute(cpus="0.1"))
    for _ in range(50):
        assert remote(3) == 6
    for number in range(3, 8):
        with opened(number):
            remote(3)


if __name__ == "__main__":
    _main()
