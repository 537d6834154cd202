"""What pods may say about the content that pods have."""

from __future__ import annotations

import pytest

from kubetorch.controller.access import (
    Asker,
    BoundPod,
    NamespacePods,
    PodIdentity,
    Principal,
    User,
)
from kubetorch.controller.routes.data import check_reporter
from kubetorch.errors import DataStoreError
from kubetorch.wire import exceptions
from kubetorch.wire.data import Holder


class Pods:
    """Access in which all but a plain user are pods of the namespace `ns`."""

    def namespace_of_pod(self, principal: Principal) -> str | None:
        return None if principal == User() else "ns"


TOKENS = [PodIdentity("ns", "s", "p0"), User(pod=BoundPod("ns", "p0", "uid"))]


@pytest.mark.parametrize("principal", TOKENS, ids=["machine", "cluster"])
def test_a_pod_reports_what_it_has_itself(principal: Principal) -> None:
    asker = Asker(principal, Pods())
    check_reporter(asker, "ns", Holder("s", "p0"))
    for namespace, pod in [("ns", "p1"), ("other", "p0")]:
        with pytest.raises(DataStoreError, match=f"the holder is '{pod}' of n") as caught:
            check_reporter(asker, namespace, Holder("s", pod))
        assert exceptions.http_status(caught.value) == 403


@pytest.mark.parametrize("principal", [User(), NamespacePods("ns")], ids=["user", "any pod"])
def test_a_token_that_names_no_pod_may_report_any(principal: Principal) -> None:
    check_reporter(Asker(principal, Pods()), "ns", Holder("s", "p1"))
