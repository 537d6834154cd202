"""Thread pools of numeric libraries: one thread while preloading, the right number after the fork.

Threads do not survive a fork, but the libraries' belief in them does. So a zygote imports them with
one thread each, by environment variables, and a forked worker sets the sizes through the libraries'
own functions. OpenMP keeps the number per thread: `NumericThreads.on_thread` is for each thread
that runs calls; threads that user code starts itself keep one OpenMP thread.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kubetorch.lib import modules, processes

#: Read by the libraries while they are loaded.
VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)

_OPENBLAS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}"
    for prefix in ("scipy_", "")
    for suffix in ("64_", "", "_64", "64")
)
#: Name of the library, its functions (the first that exists is used), the variable that it reads,
#: true if it counts hyper-threads, true if the number holds for the calling thread only.
_LIBRARIES = (
    (re.compile(r"openblas"), _OPENBLAS, "OPENBLAS_NUM_THREADS", True, False),
    (re.compile(r"libmkl_rt|mkl_rt\."), ("MKL_Set_Num_Threads",), "MKL_NUM_THREADS", False, False),
    (re.compile(r"libblis"), ("bli_thread_set_num_threads",), "BLIS_NUM_THREADS", True, False),
    (re.compile(r"libgomp|libi?omp"), ("omp_set_num_threads",), "OMP_NUM_THREADS", True, True),
)

_SetThreads = Callable[[int], object]


class NumericThreads:
    """The pools of the libraries that are loaded now. Made in the zygote, used in its forks."""

    def __init__(self) -> None:
        self._process: list[tuple[_SetThreads, str, bool]] = []
        self._thread: list[tuple[_SetThreads, str, bool]] = []
        self._sizes: list[tuple[_SetThreads, int]] = []
        for path in _loaded_libraries():
            for pattern, names, variable, is_logical, is_per_thread in _LIBRARIES:
                if pattern.search(Path(path).name):
                    function = _function(path, names)
                    if function is not None:
                        kind = self._thread if is_per_thread else self._process
                        kind.append((function, variable, is_logical))

    def resize(self, environ: Mapping[str, str]) -> None:
        """Set the sizes that `environ` asks for, or those that the libraries would have chosen."""
        for function, variable, is_logical in self._process:
            function(_size(environ, variable, is_logical=is_logical))
        self._sizes = [
            (function, _size(environ, variable, is_logical=is_logical))
            for function, variable, is_logical in self._thread
        ]
        self.on_thread()
        for module, variable, is_logical in (
            ("torch", "OMP_NUM_THREADS", False),
            ("numexpr", "NUMEXPR_NUM_THREADS", True),
        ):
            set_threads = modules.loaded(module).get("set_num_threads")
            if callable(set_threads):
                set_threads(_size(environ, variable, is_logical=is_logical))

    def on_thread(self) -> None:
        """Set the sizes that belong to the calling thread."""
        for function, size in self._sizes:
            function(size)


def _size(environ: Mapping[str, str], variable: str, *, is_logical: bool) -> int:
    for name in (variable, "OMP_NUM_THREADS"):
        # OMP_NUM_THREADS may be a list, one number for each level of nesting.
        text = environ.get(name, "").partition(",")[0].strip()
        if text.isdigit() and int(text) > 0:
            return int(text)
    return len(processes.usable()) if is_logical else _cores()


def _cores() -> int:
    """Physical cores: the two threads of one share what numeric code needs."""
    usable = processes.usable()
    cores = set()
    for number in usable:
        topology = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        try:
            cores.add(topology.read_text())
        except OSError:
            return len(usable)
    return len(cores)


def _function(path: str, names: tuple[str, ...]) -> _SetThreads | None:
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return None
    for name in names:
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes = [ctypes.c_int]
            function.restype = None
            return function  # type: ignore[no-any-return]  # a C function
    return None


def _loaded_libraries() -> list[str]:
    if sys.platform == "darwin":
        process = ctypes.CDLL(None)
        process._dyld_get_image_name.restype = ctypes.c_char_p
        count = process._dyld_image_count()
        return [os.fsdecode(process._dyld_get_image_name(index)) for index in range(count)]
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/" in line)
    return list(dict.fromkeys(path for path in paths if ".so" in path))
