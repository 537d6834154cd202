"""Notebooks that run in a real kernel."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import nbformat
    from nbclient import NotebookClient

#: The first cell.
DEPLOY = """
import kubetorch as kt
compute = kt.Compute(cpus="0.1")
def deployed(function):
    return kt.fn(function).to(compute, stream_logs=False)
"""


def run(folder: Path, *sources: str, **environ: str) -> list[str]:
    """What each cell shows; raises what one of them raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
        client = NotebookClient(
            made, timeout=90, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        client.execute(env={**os.environ, **environ})
    return ["".join(map(_shown, cell.outputs)) for cell in made.cells]


def _shown(output: dict[str, Any]) -> str:
    # Without where pods run, and which services share a `Compute`.
    text = re.sub(r"^kubetorch: .*\n", "", output.get("text", ""), flags=re.MULTILINE)
    return text or output.get("data", {}).get("text/plain", "")
