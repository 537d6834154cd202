"""Runs first in each interpreter that user code of a worker starts: its prints arrive line by line.

A worker's output is a pipe, of which Python would write whole blocks: the lines of several
processes would be torn, and those of one that is killed, as a pool does with its own, be lost.
"""

import importlib
import os
import sys

sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]  # noqa: PTH120
if sys.stdout is not None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # as it is by now
own = sys.modules.pop(__name__)
try:
    # That of the environment, which this one stands before.
    importlib.import_module(__name__)
except ImportError:
    sys.modules[__name__] = own
