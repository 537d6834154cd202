import msgspec
import pytest

from kubetorch.controller import rollout, views
from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.views import PodReport
from kubetorch.manifests import labels
from kubetorch.specs.callable import AppSpec, CallableRef
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.exceptions import Failure
from kubetorch.wire.messages import Activity, AppView, WorkloadView

PODS = [PodStatus(name=f"web-{n}", ordinal=n, phase="Running", url="http://here") for n in (0, 1)]


def status(*apps, port=None):
    """The word for two pods that serve the wanted generation, whose apps are these."""
    state = rollout.Rollout(wanted_generation=1, good=1)
    state.handle(rollout.PodsChanged(frozenset(pod.name for pod in PODS), frozenset()))
    for pod in PODS:
        state.handle(rollout.Connected(pod.name, 1))
    reports = {
        pod.name: PodReport(activity=Activity(calls=0, last=0.0, app=app))
        for pod, app in zip(PODS, apps, strict=True)
    }
    app = AppSpec("python train.py", port=port)
    ref = CallableRef("app", "web", "train", "app", app=app)
    return views.status(PODS, reports, state, WorkloadSpec("default", "web", ref))


def test_a_deploy_that_is_late_says_what_it_lacks():
    state = rollout.Rollout(wanted_generation=2, good=1)
    state.handle(rollout.PodsChanged(frozenset({"web-0"}), expected=3))
    state.handle(rollout.Connected("web-0", 2))
    words = views.waits_in_words(PODS[:1], {}, state)
    assert words == "1 of 3 pods serve generation 2; 2 of the pods are not there yet"
    assert views.waits_in_words([], {}, rollout.Rollout(wanted_generation=1)).endswith(
        "there are no pods"
    )
    words = views.waits_in_words(
        [], {}, rollout.Rollout(wanted_generation=1), "the quota 'q' is full"
    )
    assert words.endswith("there are no pods; the quota 'q' is full")


def test_calls_go_to_no_pod_of_ranks_that_nobody_reaches():
    state = rollout.Rollout(wanted_generation=1, good=1)
    state.handle(rollout.PodsChanged(frozenset(pod.name for pod in PODS)))
    for pod in PODS:
        state.handle(rollout.Connected(pod.name, 1))
    pod_views = views.pod_views(PODS, {}, state, frozenset({"web-1"}))
    assert [pod.is_ready for pod in pod_views] == [True, False]


def test_calls_go_to_no_pod_whose_agent_stops():
    state = rollout.Rollout(wanted_generation=1, good=1)
    state.handle(rollout.PodsChanged(frozenset(pod.name for pod in PODS)))
    for pod in PODS:
        state.handle(rollout.Connected(pod.name, 1))
    reports = {
        pod.name: PodReport(activity=Activity(calls=1, last=0.0, is_stopping=pod is PODS[0]))
        for pod in PODS
    }
    pod_views = views.pod_views(PODS, reports, state)
    assert [pod.is_ready for pod in pod_views] == [False, True]


def test_pods_of_an_older_template_take_calls_of_a_scaled_service_until_all_are_replaced():
    new, old = PODS[0], msgspec.structs.replace(PODS[1], is_retiring=True)
    state = rollout.Rollout(wanted_generation=2, good=1)
    state.handle(rollout.PodsChanged(frozenset({new.name}), frozenset({old.name}), 2))
    state.handle(rollout.Connected(new.name, 2))
    state.handle(rollout.Connected(old.name, 1))

    def ready(*, is_scaled):
        return [pod.is_ready for pod in views.pod_views([new, old], {}, state, is_scaled=is_scaled)]

    assert ready(is_scaled=False) == [True, False]
    assert ready(is_scaled=True) == [True, True]
    state.handle(rollout.PodsChanged(frozenset({new.name}), frozenset({old.name}), 1))
    assert ready(is_scaled=True) == [True, False]


def test_only_a_pod_of_our_own_whose_agent_says_nothing_is_unknown():
    state = rollout.Rollout(wanted_generation=1)
    theirs = msgspec.structs.replace(PODS[0], is_ours=False)
    for pod, report, phase in (
        (PODS[0], None, "Unknown"),
        (PODS[0], PodReport(), "Running"),
        (theirs, None, "Running"),
    ):
        assert views.pod_view(pod, report, state, is_ready=False).phase == phase


def test_a_pod_that_has_answered_runs_whatever_its_kubelet_has_said_so_far():
    state = rollout.Rollout(wanted_generation=1)
    pending = msgspec.structs.replace(PODS[0], phase="Pending", url="")
    for report, phase in ((None, "Pending"), (PodReport(url="http://here"), "Running")):
        assert views.pod_view(pending, report, state, is_ready=True).phase == phase


def test_a_description_has_values_of_variables_for_nobody_who_may_not_get_pods():
    secret = {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    env = [{"name": "A", "value": "hush"}, secret]
    pod = {
        "metadata": {
            "name": "p",
            "uid": "5",
            "annotations": {"x": "y", labels.LAST_APPLIED: "hush"},
        },
        "spec": {
            "nodeName": "n",
            "containers": [{"name": "c", "env": env}],
            "initContainers": [{"name": "i", "env": env}, {"name": "j"}],
        },
        "status": {"phase": "Running"},
    }
    description = views.without_values(pod)
    assert "hush" not in str(description)
    assert description["spec"]["containers"][0]["env"] == [{"name": "A"}, secret]
    assert (description["spec"]["nodeName"], description["metadata"]["uid"]) == ("n", "5")
    assert description["metadata"]["annotations"] == {"x": "y"}
    assert "hush" in str(pod)


def test_a_service_that_lacks_pods_is_scaling():
    state = rollout.Rollout(wanted_generation=1, good=1)
    state.handle(rollout.PodsChanged(frozenset({"web-0"}), expected=2))
    state.handle(rollout.Connected("web-0", 1))
    spec = WorkloadSpec("default", "web", CallableRef("fn", "web", "train", "train"))
    assert views.status(PODS[:1], {}, state, spec) == "Scaling"


def given_up(good, **about):
    """The word for a pod that has not connected, after the wanted generation was given up."""
    state = rollout.Rollout(
        wanted_generation=2, good=good, failure=Failure("ImportError", "no module")
    )
    pod = msgspec.structs.replace(PODS[0], **{"started": 1.0, **about})
    state.handle(rollout.PodsChanged(frozenset({pod.name})))
    spec = WorkloadSpec("default", "web", CallableRef("fn", "web", "train", "train"))
    return views.status([pod], {}, state, spec)


def test_a_pod_that_has_to_connect_again_serves_what_was_served_before():
    assert given_up(good=1) == "Creating"
    assert given_up(good=1, phase="Pending", is_down=True) == "Creating"
    assert given_up(good=0) == "Failed"
    assert given_up(good=1, started=0.0, phase="Pending") == "Failed"
    assert given_up(good=1, phase="Terminating") == "Failed"
    assert given_up(good=1, failure=Failure("ServiceHealthError", "it ended")) == "Failed"


RUNS = AppView(state="running", pid=1)


@pytest.mark.parametrize(
    ("apps", "port", "word"),
    [
        ((RUNS, RUNS), 8000, "Ready"),
        ((RUNS, RUNS), None, "Running"),
        ((RUNS, AppView(state="exited", exit_code=0)), None, "Running"),
        ((AppView(state="exited", exit_code=0),) * 2, None, "Succeeded"),
        ((RUNS, AppView(state="exited", exit_code=3)), None, "Failed"),
        ((None, None), None, "Ready"),
    ],
)
def test_a_service_that_runs_an_app_is_as_its_app_is(apps, port, word):
    assert status(*apps, port=port) == word


def test_as_many_pods_are_wanted_as_the_object_of_a_workload_asks_for():
    ref = CallableRef("fn", "web", "train", "web")
    spec = WorkloadSpec("default", "web", ref)
    view = WorkloadView(spec=spec, generation=1, status="Ready", pods_wanted=2)
    assert views.summary(view, 0.0).pods == 2
    assert views.summary(msgspec.structs.replace(view, pods_wanted=0), 0.0).pods == 1
    failure = {"error_type": "ImagePullError", "message": "no such image"}
    failed = views.summary(msgspec.structs.replace(view, failure=failure, reason="waits"), 0.0)
    assert (failed.reason, failed.message) == ("ImagePullError", "no such image")
    waiting = views.summary(msgspec.structs.replace(view, reason="the quota is full"), 0.0)
    assert (waiting.reason, waiting.message) == ("", "the quota is full")
