"""Runs first in each interpreter that an app, or user code of a worker, starts.

In an app, it writes the stacks of its threads to a file when the agent asks for them by a signal.

Prints of the others arrive line by line. A worker's output is a pipe, to which Python would write
whole blocks: the lines of several processes would be torn, and the lines of a killed process, as of
a pool's, be lost.
"""

import importlib
import os
import sys

sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]  # noqa: PTH120
if "KT_APP_STACKS" in os.environ:
    import _signal  # type: ignore[import-not-found]  # signal itself imports enum
    import faulthandler

    number, _, path = os.environ["KT_APP_STACKS"].partition(":")

    def write_stacks(*_: object) -> None:
        try:
            with open(path, "r+b") as file:  # noqa: PTH123  # pathlib takes long to import
                faulthandler.dump_traceback(file)
        except OSError:  # the app goes on
            pass

    _signal.signal(int(number), write_stacks)
elif sys.stdout is not None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # as it is by now
this_module = sys.modules.pop(__name__)
try:
    # The environment's own sitecustomize, which this file hides.
    importlib.import_module(__name__)
except ImportError:
    sys.modules[__name__] = this_module
