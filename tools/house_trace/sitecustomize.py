"""Notes which files of kubetorch run, in every process whose `PYTHONPATH` names this file's folder.

`tools/house.py` copies this file into a folder with three others. The first byte of `window` is the
number of the open window, 0 for none. When a process enters a function of a file below the folder
that `sources` names, it adds a line to `log`, once per window: window and path.
"""

import mmap
import os
import sys
import threading


def _trace() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # every start pays
    with open(os.path.join(folder, "sources")) as file:  # noqa: PTH118, PTH123
        sources = file.read()
    with open(os.path.join(folder, "window"), "r+b") as file:  # noqa: PTH118, PTH123
        window = mmap.mmap(file.fileno(), 1)
    opened = os.open(os.path.join(folder, "log"), os.O_WRONLY | os.O_APPEND)  # noqa: PTH118
    # High, so as not to take a descriptor that a program expects for itself.
    log = os.dup2(opened, 900, inheritable=False)
    os.close(opened)
    logged_entries = set()

    def entered(frame, event, _argument) -> None:
        number = window[0]
        if number and event == "call":
            code = frame.f_code
            path = code.co_filename
            if (
                (number, path) not in logged_entries
                and path.startswith(sources)
                and code.co_name != "<module>"
            ):
                logged_entries.add((number, path))
                os.write(log, f"{number} {path}\n".encode())

    threading.setprofile(entered)
    sys.setprofile(entered)


_trace()
