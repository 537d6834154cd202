"""Notebooks that run in a real kernel.

The first notebook imports nbclient, whose libraries take seconds: each worker of `pytest` imports
this file, and few run a notebook.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

#: The first cell.
DEPLOY = """
import kubetorch as kt
compute = kt.Compute(cpus="0.1")
def deployed(function):
    return kt.fn(function).to(compute, stream_logs=False)
"""


#: Makes a kernel as good as new.
_RESET = "import linecache; linecache.clearcache(); get_ipython().reset(new_session=True)"


def run(folder: Path, *sources: str, kernel: Any = None, **environ: str) -> list[str]:
    """What each cell shows; raises what one of them raises.

    Args:
        folder: Where it runs.
        sources: Of the cells.
        kernel: Of `kernel_in`; one of its own otherwise.
        environ: Variables of its own kernel.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kernel is not None:
            _execute(folder, [_RESET], kernel, environ)
        notebook = _execute(folder, sources, kernel, environ)
    return ["".join(map(_shown, cell.outputs)) for cell in notebook.cells]


@contextlib.contextmanager
def kernel_in(folder: Path) -> Iterator[Any]:
    """A kernel for several notebooks, one after the other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = _client(folder, [], None)
        kernel = client.create_kernel_manager()
        client.start_new_kernel(env=dict(os.environ))
    try:
        yield kernel
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            client._cleanup_kernel()


def a_cell_fails(match: str | None = None) -> pytest.RaisesExc[CellExecutionError]:
    """`pytest.raises` for what a cell raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nbclient.exceptions import CellExecutionError
    return pytest.raises(CellExecutionError, match=match)


def _client(folder: Path, sources: Sequence[str], kernel: Any) -> NotebookClient:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    resources = {"metadata": {"path": folder}}
    return NotebookClient(notebook, kernel, timeout=90, kernel_name="python3", resources=resources)


def _execute(
    folder: Path, sources: Sequence[str], kernel: Any, environ: Mapping[str, str]
) -> nbformat.NotebookNode:
    client = _client(folder, sources, kernel)
    try:
        return client.execute(env={**os.environ, **environ})
    finally:
        if kernel is not None:
            client.kc.stop_channels()


def _shown(output: dict[str, Any]) -> str:
    # Without where pods run, and which services share a `Compute`.
    text = re.sub(r"^kubetorch: .*\n", "", output.get("text", ""), flags=re.MULTILINE)
    return text or output.get("data", {}).get("text/plain", "")
