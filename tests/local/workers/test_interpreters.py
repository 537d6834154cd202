"""The interpreter of a container: what it reports when it starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kubetorch.pod.environment import Interpreters
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.image import ImageSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.podenv import PodEnv

POD = PodEnv(
    namespace="ns",
    workload="train",
    pod="train-0",
    host="127.0.0.1",
    port=1,
    root="/root",
    working_dir="/work",
    environments="/environments",
    backend="kubernetes",
)


def test_a_line_of_a_program_that_begins_like_a_report_is_no_report(tmp_path: Path) -> None:
    python = tmp_path / "python"
    report = 'kubetorch ["/py", [3, 12, 1], ["/site"]]'
    python.write_text(f"#!/bin/sh\necho kubetorch is here\necho kubetorch []\necho '{report}'\n")
    python.chmod(0o755)
    compute = ComputeSpec(image=ImageSpec(python_path=str(python)))
    spec = WorkloadSpec("ns", "train", CallableRef("fn", "f", "m", "f"), compute=compute)
    runtime = asyncio.run(Interpreters(POD, {}).choose(spec)).runtime
    assert (runtime.python, runtime.version, runtime.site) == ("/py", "3.12.1", ("/site",))
