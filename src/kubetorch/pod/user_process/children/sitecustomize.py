"""Runs first in each interpreter that user code of a worker starts: its prints arrive line by line.

A worker's output is a pipe, to which Python would write whole blocks: the lines of several
processes would be torn, and the lines of a killed process, as of a pool's, be lost.
"""

import importlib
import os
import sys

sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]  # noqa: PTH120
if sys.stdout is not None:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # as it is by now
this_module = sys.modules.pop(__name__)
try:
    # The environment's own sitecustomize, which this file hides.
    importlib.import_module(__name__)
except ImportError:
    sys.modules[__name__] = this_module
