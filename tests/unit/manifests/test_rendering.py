"""The Deployment of a workload, and what other backends read in it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kubetorch._version import __version__
from kubetorch.errors import SpecError
from kubetorch.manifests import desired_pods, knative, labels, parameters, rendering
from kubetorch.manifests.container_variables import TextVariable
from kubetorch.specs import autoscaling
from kubetorch.specs.callable import BatchedMethod, CallableRef
from kubetorch.specs.compute import ComputeSpec, freeze
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.workload import WorkloadSpec

REF = CallableRef("fn", "train", "package.module", "train")
COMPUTE = ComputeSpec(
    cpus="0.5",
    memory="2Gi",
    env_vars=(("B", "2"), ("A", "1")),
    labels=(("team", "ml"),),
    logging=LoggingConfig(level="debug"),
)
SPEC = WorkloadSpec("ns", "train", REF, COMPUTE, username="me")


def container(compute: ComputeSpec) -> dict[str, object]:
    manifest = rendering.render(compute, namespace="ns")
    (agent_container,) = manifest["spec"]["template"]["spec"]["containers"]
    return agent_container  # type: ignore[no-any-return]


def test_labels_of_a_workload() -> None:
    manifest = rendering.of_workload(SPEC)
    pod_labels = {
        "kubetorch.com/version": __version__,
        "kubetorch.com/service": "train",
        "kubetorch.com/username": "me",
        "app": "train",
        "team": "ml",
    }
    of_object = {
        "kubetorch.com/template": "deployment",
        "kubetorch.com/module": "package.module",
    }
    assert manifest["metadata"]["labels"] == pod_labels | of_object
    assert manifest["spec"]["template"]["metadata"]["labels"] == pod_labels
    assert manifest["spec"]["selector"] == {"matchLabels": {"kubetorch.com/service": "train"}}


def test_a_pod_of_knative_gets_the_calls_of_a_whole_batch_at_once() -> None:
    compute = replace(COMPUTE, autoscaling=autoscaling.parse_config({"concurrency": 2}))
    batched = replace(REF, batched=(BatchedMethod("", 8),))
    for callable, limit in ((REF, 2), (batched, 16)):
        manifest = rendering.of_workload(replace(SPEC, callable=callable, compute=compute))
        assert manifest["spec"]["template"]["spec"]["containerConcurrency"] == limit


def test_a_user_label_does_not_replace_one_of_ours() -> None:
    compute = replace(COMPUTE, labels=((labels.SERVICE, "other"),))
    manifest = rendering.of_workload(replace(SPEC, compute=compute))
    assert manifest["metadata"]["labels"][labels.SERVICE] == "train"


def test_without_a_username_there_is_no_such_label() -> None:
    manifest = rendering.of_workload(replace(SPEC, username=None))
    assert labels.USERNAME not in manifest["metadata"]["labels"]


def test_a_compute_that_is_not_deployed_has_no_name() -> None:
    manifest = rendering.render(ComputeSpec(), namespace="ns")
    assert manifest["metadata"]["name"] is None
    assert manifest["spec"]["selector"] == {"matchLabels": {}}


def test_requests_have_no_limits() -> None:
    assert container(COMPUTE)["resources"] == {"requests": {"cpu": "0.5", "memory": "2Gi"}}
    assert container(ComputeSpec())["resources"] == {}


def test_the_environment_is_sorted_and_has_the_log_level() -> None:
    assert container(COMPUTE)["env"] == [
        {"name": "A", "value": "1"},
        {"name": "B", "value": "2"},
        {"name": "KT_LOG_LEVEL", "value": "DEBUG"},
    ]


def test_a_log_level_that_the_user_set_stays() -> None:
    compute = ComputeSpec(env_vars=(("KT_LOG_LEVEL", "ERROR"),))
    assert container(compute)["env"] == [{"name": "KT_LOG_LEVEL", "value": "ERROR"}]


def test_the_launch_timeout_is_counted_in_startup_probes() -> None:
    probe = container(ComputeSpec(launch_timeout=603))["startupProbe"]
    assert (probe["periodSeconds"], probe["failureThreshold"]) == (5, 120)  # type: ignore[index]


def test_several_replicas_are_recreated() -> None:
    single_spec = rendering.render(ComputeSpec(), namespace="ns")["spec"]
    assert single_spec["strategy"] == {"type": "RollingUpdate"}
    several_spec = rendering.render(ComputeSpec(replicas=3), namespace="ns")["spec"]
    assert (several_spec["replicas"], several_spec["strategy"]) == (3, {"type": "Recreate"})


def test_annotations_say_what_callers_may_send_and_when_it_ends() -> None:
    compute = ComputeSpec(allowed_serialization=("json", "pickle"), inactivity_ttl="1h")
    assert rendering.render(compute, namespace="ns")["metadata"]["annotations"] == {
        "kubetorch.com/allowed-serialization": "json,pickle",
        "kubetorch.com/inactivity-ttl": "1h",
    }


def test_a_manifest_is_plain_json() -> None:
    manifest = rendering.of_workload(SPEC)
    assert json.loads(json.dumps(manifest)) == manifest


def test_a_module_label_is_cut_from_the_left_and_cleaned() -> None:
    assert labels.value("a" * 70 + "._x_") == "a" * 59 + "._x"
    assert labels.value("naïve module") == "na-ve-module"


# ------------------------------------------------------------------------------- replacing pods


def fingerprint(spec: WorkloadSpec) -> str:
    return rendering.fingerprint(rendering.of_workload(spec)["spec"]["template"])


def test_code_from_another_file_does_not_replace_pods() -> None:
    moved_spec = replace(SPEC, callable=replace(REF, module="another.module"), tree="0" * 64)
    assert fingerprint(moved_spec) == fingerprint(SPEC)


def test_replicas_and_annotations_do_not_replace_pods() -> None:
    compute = replace(COMPUTE, replicas=4, allowed_serialization=("pickle",), inactivity_ttl="1h")
    assert fingerprint(replace(SPEC, compute=compute)) == fingerprint(SPEC)


def test_another_environment_or_working_directory_replaces_pods() -> None:
    for change in ({"env_vars": ()}, {"working_dir": "/data"}, {"labels": ()}, {"cpus": "1"}):
        compute = replace(COMPUTE, **change)  # type: ignore[arg-type]
        assert fingerprint(replace(SPEC, compute=compute)) != fingerprint(SPEC)


# ------------------------------------------------------------------------- autoscaled services


def scaled(**arguments: Any) -> ComputeSpec:
    return replace(COMPUTE, autoscaling=autoscaling.parse(arguments, launch_timeout=900))


def plain(compute: ComputeSpec) -> dict[str, Any]:
    """The object of an autoscaled service in a cluster without Knative."""
    return rendering.render(compute, namespace="ns", name="train", has_operator=False)


FEW = scaled(min_scale=1)
MANY = scaled(
    min_scale=3,
    max_scale=9,
    concurrency=4,
    metric="memory",
    target=70,
    window="30s",
    buffer=2,
    target_burst_capacity=7,
)


def test_without_knative_the_scaler_decides_and_a_deploy_does_not() -> None:
    manifest = plain(MANY)
    assert manifest["kind"] == "Deployment"
    assert "replicas" not in manifest["spec"]
    assert manifest["spec"]["strategy"] == {"type": "RollingUpdate"}
    assert manifest["metadata"]["labels"][labels.TEMPLATE] == "ksvc"
    assert desired_pods.read(manifest).replicas == 1
    extra = {"autoscaling.knative.dev/target-burst-capacity": "7"}
    assert manifest["metadata"]["annotations"].items() >= extra.items()


def test_the_numbers_of_a_scaler_do_not_replace_pods() -> None:
    assert plain(FEW)["spec"]["template"] == plain(MANY)["spec"]["template"]
    few, many = (rendering.render(compute, namespace="ns", name="train") for compute in (FEW, MANY))
    assert few != many
    assert desired_pods.read(few).template_digest == desired_pods.read(many).template_digest
    other = rendering.render(replace(FEW, cpus="3"), namespace="ns", name="train")
    assert desired_pods.read(other).template_digest != desired_pods.read(few).template_digest


def test_pods_that_leave_have_time_for_their_calls() -> None:
    def grace_seconds(compute: ComputeSpec) -> object:
        return plain(compute)["spec"]["template"]["spec"].get("terminationGracePeriodSeconds")

    template = {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 20}}}}
    text = freeze(template, parameter="service_template")
    assert grace_seconds(FEW) == 300
    assert grace_seconds(replace(FEW, service_template=text)) == 20
    assert grace_seconds(COMPUTE) is None


def test_every_knative_service_scales() -> None:
    assert knative.scaling(FEW) == FEW.autoscaling
    assert knative.scaling(COMPUTE) is None
    manifest = rendering.render(MANY, namespace="ns", name="train")
    declared = replace(parameters.read_manifest(manifest), autoscaling=None)
    scaling = knative.scaling(declared)
    assert scaling is not None
    assert (scaling.min_scale, scaling.target, scaling.concurrency) == (3, 70, 4)
    spec = manifest["spec"]["template"]
    bare = {**manifest, "spec": {"template": {"spec": {"containers": spec["spec"]["containers"]}}}}
    unsaid = knative.scaling(parameters.read_manifest(bare))
    assert unsaid is not None
    assert (unsaid.fewest_pods, unsaid.autoscaler_class) == (1, autoscaling.KPA)
    deployment = parameters.read_manifest(plain(COMPUTE))
    assert knative.scaling(deployment) is None


@pytest.mark.parametrize(("name", "text"), [("window", "60"), ("min-scale", "-1"), ("target", "x")])
def test_an_annotation_that_means_nothing_is_refused(name: str, text: str) -> None:
    manifest = rendering.render(FEW, namespace="ns", name="train")
    manifest["spec"]["template"]["metadata"]["annotations"][f"autoscaling.knative.dev/{name}"] = (
        text
    )
    with pytest.raises(SpecError, match=f"the Service cannot be read: (.|\n)*{text}"):
        parameters.read_manifest(manifest)


def test_a_backend_reads_what_it_needs() -> None:
    compute = replace(COMPUTE, replicas=2, working_dir="/data")
    pods = desired_pods.read(rendering.of_workload(replace(SPEC, compute=compute)))
    assert (pods.namespace, pods.name, pods.replicas) == ("ns", "train", 2)
    assert pods.variables == (
        TextVariable("A", "1"),
        TextVariable("B", "2"),
        TextVariable("KT_LOG_LEVEL", "DEBUG"),
    )
    assert pods.working_dir == "/data"
    assert pods.is_recreated
    assert pods.requests == (("cpu", "0.5"), ("memory", "2Gi"))
