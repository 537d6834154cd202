"""Which pods are gone for good."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.workload import lost_pods
from kubetorch.wire.messages import Ending

POD = PodStatus("f-1", 0, "Running", "http://127.0.0.1:1")
EVICTED = replace(POD, phase="Terminating", ending=Ending(reason="Evicted"))


@pytest.mark.parametrize(
    ("before", "after", "expected_reasons"),
    [
        pytest.param([], [POD], {}, id="one that comes"),
        pytest.param(
            [replace(POD, uid="a")], [replace(POD, uid="b")], {"f-1": "Deleted"}, id="another one"
        ),
        pytest.param([POD], [POD], {}, id="one that stays"),
        pytest.param([POD], [EVICTED], {}, id="one that still ends"),
        pytest.param([POD], [replace(POD, phase="Pending")], {}, id="one that starts again"),
        pytest.param([POD], [], {"f-1": "Deleted"}, id="one that is not there"),
        pytest.param([EVICTED], [], {"f-1": "Evicted"}, id="what was known of it before"),
        pytest.param(
            [POD], [replace(EVICTED, phase="Failed")], {"f-1": "Evicted"}, id="one that failed"
        ),
        pytest.param([replace(POD, phase="Failed")], [], {}, id="one that had failed before"),
    ],
)
def test_a_pod_is_gone(
    before: list[PodStatus], after: list[PodStatus], expected_reasons: dict[str, str]
) -> None:
    endings = lost_pods(before, after)
    assert {name: ending.reason for name, ending in endings.items()} == expected_reasons
