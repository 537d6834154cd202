"""Programs of tests that go into a mount namespace and have a view there."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

_BEGIN = """
import json, os, sys
from pathlib import Path
from kubetorch.lib.mounts import Mount, View, separate
folder = Path(sys.argv[1])
assert separate() is None
view = View(folder / "view")
"""


def skip_without_namespaces(folder: Path) -> Path:
    """The folder, if this machine allows mount namespaces."""
    probe = folder / "probe"
    probe.mkdir()
    command = [sys.executable, "-m", "kubetorch.lib.mounts", str(probe)]
    if subprocess.run(command, capture_output=True, timeout=60).returncode != 0:
        pytest.skip("this machine allows no mount namespaces")
    return folder


def in_namespace(folder: Path, program: str, *, before: str = "") -> Any:
    """What a program in a namespace of its own prints, as JSON.

    Args:
        folder: Known to it by this name.
        program: Has `view` too.
        before: What runs before it goes into its namespace.
    """
    text = before + _BEGIN + textwrap.dedent(program)
    completed = subprocess.run(
        [sys.executable, "-c", text, str(folder)], capture_output=True, text=True, timeout=280
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)
