"""What `kt check` makes of the pods of a service."""

import pytest
from msgspec.structs import replace

from kubetorch._version import __version__
from kubetorch.cli import check
from kubetorch.errors import PodContainerError
from kubetorch.wire import versions
from kubetorch.wire.messages import PodView
from tests.unit.cli.test_views import SERVICE

SCALED = replace(SERVICE, scaler="http://train.default.svc", pods=())
STARTING = PodView(name="train-1", ordinal=1, phase="Pending", reason="ContainerCreating")


def test_a_service_whose_pods_are_ready_is_well():
    assert check.judge_pods(SERVICE) is None


def test_a_service_without_its_pods_is_broken():
    with pytest.raises(PodContainerError, match="0 of 1 pods are ready"):
        check.judge_pods(replace(SERVICE, pods=()))


def test_a_service_that_is_scaled_to_zero_is_well_and_says_so():
    assert check.judge_pods(SCALED) == "scaled to zero, a call makes a pod"


def test_a_scaled_service_whose_generation_failed_is_not_taken_for_one_that_rests():
    with pytest.raises(PodContainerError, match="there are no pods"):
        check.judge_pods(replace(SCALED, status="Failed"))


def test_a_scaled_service_whose_only_pod_does_not_start_is_broken():
    with pytest.raises(PodContainerError, match="train-1: ContainerCreating"):
        check.judge_pods(replace(SCALED, pods=(STARTING,)))


def test_a_scaled_service_may_have_fewer_pods_ready_than_it_begins_with():
    pods = (*SERVICE.pods, STARTING)
    assert check.judge_pods(replace(SCALED, pods=pods)) is None


def judged(version, protocol=versions.PROTOCOL):
    return check.judge_version(check.Health(version, protocol))


def test_a_controller_of_this_version_is_well():
    assert judged(__version__).state == "ok"


def test_who_is_older_is_told_to_become_newer():
    older, newer = judged("0.1.0"), judged("999.0.0")
    assert (older.state, newer.state) == ("note", "note")
    assert older.hint.startswith("kt upgrade makes the controller newer")
    assert newer.hint.startswith("pip install kubetorch==999.0.0")


@pytest.mark.parametrize(
    ("protocol", "hint"),
    [(None, "kt upgrade"), (versions.PROTOCOL + 1, "pip install kubetorch==999.0.0")],
)
def test_who_cannot_be_understood_is_broken(protocol, hint):
    check = judged("999.0.0", protocol)
    assert check.state == "broken"
    assert hint in check.hint
