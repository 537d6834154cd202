"""`pods()` has what the user declared of pods, also where they are processes."""

from __future__ import annotations

from pathlib import Path

import kubetorch as kt
from tests.local.user_project import UserProject


def test_pods_have_their_annotations(service_home: Path, project: UserProject) -> None:
    jobs = project.module("def f():\n    return 1\n")
    compute = kt.Compute(cpus="0.1", annotations={"owner": "ann"})
    kt.fn(jobs.f).to(compute)
    (pod,) = compute.pods()
    assert pod.metadata.annotations == {"owner": "ann"}
    assert compute.pod_names() == [pod.metadata.name]
