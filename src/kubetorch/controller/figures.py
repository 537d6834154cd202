"""Figures of the controller for Prometheus, in its text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from kubetorch._version import __version__
from kubetorch.wire.messages import WorkloadView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: The words of `kt list`, so that a figure that is 0 is there too.
_STATUSES = ("Ready", "Creating", "Scaling", "Failed", "Running", "Succeeded", "No pods")


def text(views: Iterable[WorkloadView], *, started: float) -> str:
    """The figures.

    Args:
        views: What is deployed.
        started: When the controller began to lead, in seconds since the epoch.
    """
    found = list(views)
    statuses = Counter(dict.fromkeys(_STATUSES, 0))
    statuses.update(view.status for view in found)
    pods = [pod for view in found for pod in view.pods]
    lines = [
        *_metric("build_info", "Version of the controller.", {f'version="{__version__}"': 1}),
        *_metric("start_time_seconds", "When the controller began to lead.", {"": started}),
        *_metric(
            "workloads",
            "Services by their status.",
            {f'status="{status}"': count for status, count in statuses.items()},
        ),
        *_metric("pods", "Pods of services.", {"": len(pods)}),
        *_metric("pods_ready", "Pods that serve calls.", {"": sum(pod.is_ready for pod in pods)}),
    ]
    return "\n".join(lines) + "\n"


def _metric(name: str, meaning: str, values: dict[str, float]) -> Iterator[str]:
    full = f"kubetorch_controller_{name}"
    yield f"# HELP {full} {meaning}"
    yield f"# TYPE {full} gauge"
    for labels, value in values.items():
        yield f"{full}{{{labels}}} {value}" if labels else f"{full} {value}"
