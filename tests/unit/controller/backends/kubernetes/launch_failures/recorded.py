"""What a real cluster said of launches that could not succeed, or had to wait (`records/`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from kubetorch.controller.backends.kubernetes.launch_failures import diagnosis, snapshot
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import (
    AUTOSCALER_STATUS,
    CLAIMS,
    KAI_QUEUES,
    KUEUE_WORKLOADS,
    LOCAL_QUEUES,
    NODE_POOLS,
    NODES,
    STORAGE_CLASSES,
    Cluster,
)
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import Verdict

RECORDS = Path(__file__).with_name("records")
#: Seconds after the last event of a record in which it is judged.
LATER = 5.0
#: What the cluster of the records does not serve.
ABSENT = frozenset({NODE_POOLS, LOCAL_QUEUES, KUEUE_WORKLOADS, KAI_QUEUES})


def read(name: str) -> dict[str, Any]:
    record: dict[str, Any] = yaml.safe_load((RECORDS / f"{name}.yaml").read_text())
    return record


def cluster(record: dict[str, Any]) -> Cluster:
    """The cluster of a record, some seconds after the last that happened in it."""
    cluster_record = read("cluster")
    objects = {
        NODES: cluster_record["nodes"],
        STORAGE_CLASSES: cluster_record["storage_classes"],
        CLAIMS: record.get("claims", []),
        AUTOSCALER_STATUS: [],
    }
    return Cluster(_last(record) + LATER, objects, ABSENT)


def _last(record: dict[str, Any]) -> float:
    manifests = [*record.get("owners", ()), *([record["pod"]] if "pod" in record else ())]
    creation_times = [
        snapshot.time_of(manifest["metadata"]["creationTimestamp"]) or 0.0 for manifest in manifests
    ]
    return max([*creation_times, *map(snapshot.last_time, record["events"])])


def judge(name: str, *, now: float | None = None) -> Verdict:
    """The verdict about a record, some seconds after the last that happened in it, or at `now`."""
    record = read(name)
    recorded_cluster = cluster(record)
    if now is not None:
        recorded_cluster = replace(recorded_cluster, now=now)
    if "pod" in record:
        return diagnosis.judge_pod(record["pod"], events=record["events"], cluster=recorded_cluster)
    owners = record["owners"]
    return diagnosis.judge_owner(
        owners[0], owners, events=record["events"], cluster=recorded_cluster
    )
