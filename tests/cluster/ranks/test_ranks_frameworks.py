"""The examples of distributed services that need a framework, which their pods install.

PyTorch and JAX are in every run, the others in one with `KT_TEST_WHOLE=1`: they take minutes. Ray
needs an image that has it, where the cluster has KubeRay.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import shared
from cluster.conftest import Installed
from cluster.ranks.test_ranks import RAY_IMAGE
from example_programs import EXAMPLES, FRAMEWORKS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

#: Examples whose frameworks are installed in seconds.
ALWAYS = ("ddp.py", "jax_pmap.py")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_ranks_of_a_framework_work_together_on_a_cluster(
    name: str, tmp_path: Path, installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name not in ALWAYS and not shared.WHOLE:
        pytest.skip("KT_TEST_WHOLE=1 runs it")
    if name == "ray_tune.py":
        if RAY_IMAGE is None:
            pytest.skip("KT_TEST_RAY_IMAGE names no image")
        monkeypatch.setenv("RAY_IMAGE", RAY_IMAGE)
    folder = shutil.copytree(EXAMPLES, tmp_path / "examples")

    shown = installed.run(sys.executable, name, cwd=folder, timeout=800)

    expected = FRAMEWORKS[name][1]
    assert shown.splitlines()[-len(expected) :] == expected, shown
