"""The command that tries options of `autoscale()`, on a cluster, with Knative and without."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from cluster.conftest import Installed

#: The command has Kubetorch installed with another engine, for its run.
pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.timeout(150)]
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("engine", ["deployments", "knative"])
def test_the_command_says_what_an_option_did_and_that_it_should(
    installed: Installed, engine: str
) -> None:
    command = (sys.executable, "-m", "tools.autoscaling_options", "--engine", engine)
    printed = installed.run(*command, "--only", "concurrency=1", cwd=ROOT, timeout=130)
    assert re.search(rf"ok {engine} concurrency=1 · \d+\.\d s on 1 pod\n", printed)
