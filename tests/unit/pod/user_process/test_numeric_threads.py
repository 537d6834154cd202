"""How many threads numeric pools get."""

from __future__ import annotations

import os

import numpy  # noqa: F401  # loads its library
import pytest

from kubetorch.pod.user_process import numeric_threads


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({"OPENBLAS_NUM_THREADS": "3", "OMP_NUM_THREADS": "2"}, 3),
        ({"OMP_NUM_THREADS": "2,1"}, 2),
        ({"OPENBLAS_NUM_THREADS": "0", "OMP_NUM_THREADS": "nonsense"}, None),
        ({}, None),
    ],
)
def test_the_variables_decide_as_they_do_for_the_libraries(
    environ: dict[str, str], size: int | None
) -> None:
    expected = size or len(os.sched_getaffinity(0))
    assert numeric_threads._size(environ, "OPENBLAS_NUM_THREADS", is_logical=True) == expected


def test_the_pools_of_loaded_libraries_are_found() -> None:
    threads = numeric_threads.NumericThreads()
    assert [variable for _, variable, _ in threads._process] == ["OPENBLAS_NUM_THREADS"]
