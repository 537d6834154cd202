"""Where a manifest describes its pods, and errors that say where it does not."""

from __future__ import annotations

from typing import Any

import pytest

from kubetorch.errors import SpecError
from kubetorch.manifests import kinds, parameters
from unit.manifests.users import Manifest, manifests, template


def refusal(manifest: Any, path: Any = None) -> SpecError:
    with pytest.raises(SpecError) as caught:
        parameters.read_manifest(manifest, pod_template_path=path)
    assert isinstance(caught.value, ValueError)
    return caught.value


def gang(**spec: Any) -> Manifest:
    return {"apiVersion": "example.com/v1", "kind": "Gang", "spec": spec}


def test_every_kind_of_the_table_has_an_example() -> None:
    assert {row.kind for row in kinds.KINDS.values()} == set(manifests())


@pytest.mark.parametrize("key", ["kind", "apiVersion"])
def test_an_object_without_a_kind_or_version_is_none(key: str) -> None:
    manifest = manifests()["Job"]
    del manifest[key]
    assert f"no '{key}'" in refusal(manifest).message


def test_what_is_no_dictionary_is_no_manifest() -> None:
    assert "manifest is [1]" in refusal([1]).message


def test_an_unknown_kind_needs_a_path_and_is_told_the_only_one() -> None:
    error = refusal(gang(tasks=[{"template": template()}]))
    assert "'Gang' of 'example.com/v1'" in error.message
    assert "pod_template_path" in error.message
    assert error.hint == 'it seems to be pod_template_path="spec.tasks.0.template"'


def test_an_unknown_kind_with_two_candidates_is_told_both() -> None:
    error = refusal(gang(a=template(), b={"c": template()}))
    assert error.hint == (
        'it may be one of pod_template_path="spec.a", pod_template_path="spec.b.c"'
    )


def test_an_unknown_kind_with_no_candidate_is_told_what_one_looks_like() -> None:
    error = refusal(gang(size=3))
    assert error.hint is not None
    assert "nothing in it looks like a pod template" in error.hint


def test_a_service_of_kubernetes_is_not_one_of_knative() -> None:
    error = refusal({"apiVersion": "v1", "kind": "Service", "spec": {"ports": []}})
    assert "'Service' of 'v1' is not known" in error.message


def test_a_known_kind_of_another_group_is_told_its_own() -> None:
    error = refusal({**manifests()["Job"], "apiVersion": "apps/v1"})
    assert "'Job' of 'apps/v1' is not known" in error.message
    assert error.hint == (
        'did you mean apiVersion batch/v1? Else, it seems to be pod_template_path="spec.template"'
    )


def test_a_template_that_is_absent_is_named_with_the_one_that_is_there() -> None:
    manifest = manifests()["PyTorchJob"]
    specs = manifest["spec"]["pytorchReplicaSpecs"]
    specs["Worker"] = specs.pop("Master")
    error = refusal(manifest)
    assert "no pod template at spec.pytorchReplicaSpecs.Master.template" in error.message
    assert error.hint is not None
    assert 'pod_template_path="spec.pytorchReplicaSpecs.Worker.template"' in error.hint


def test_a_template_that_is_nowhere_is_named_with_what_is_missing() -> None:
    manifest = manifests()["Deployment"]
    del manifest["spec"]["template"]
    error = refusal(manifest)
    assert "the Deployment has no pod template at spec.template" in error.message
    assert error.hint is not None
    assert "`containers`" in error.hint


def test_containers_where_a_template_belongs_are_named() -> None:
    manifest = manifests()["Deployment"]
    manifest["spec"] = manifest["spec"]["template"]["spec"]
    assert refusal(manifest).hint == (
        "its own spec has `containers`: put them, with a `spec`, below spec.template"
    )


def test_a_path_that_leads_nowhere_is_named() -> None:
    error = refusal(gang(tasks=[{"template": template()}]), "spec.tasks.1.template")
    assert "no pod template at spec.tasks.1.template" in error.message
    assert error.hint is not None
    assert 'pod_template_path="spec.tasks.0.template"' in error.hint


@pytest.mark.parametrize("path", ["", "spec..template", [], 3, {"spec": 1}])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    assert "pod_template_path is" in refusal(gang(a=template()), path).message


def test_several_equal_candidates_are_all_named() -> None:
    manifest = manifests()["JobSet"]
    jobs = manifest["spec"]["replicatedJobs"]
    jobs.append({**jobs[0], "name": "others"})
    error = refusal(manifest)
    assert "has 2 pod templates at spec.replicatedJobs" in error.message
    assert error.hint == (
        'pod_template_path="spec.replicatedJobs.0.template.spec.template" or '
        'pod_template_path="spec.replicatedJobs.1.template.spec.template"'
    )
    chosen = parameters.read_manifest(
        manifest, pod_template_path="spec.replicatedJobs.1.template.spec.template"
    )
    assert chosen.pod_template_path is not None


@pytest.mark.parametrize("containers", [None, [], {}, "app"])
def test_a_template_without_containers_is_refused(containers: Any) -> None:
    manifest = manifests()["Job"]
    manifest["spec"]["template"]["spec"]["containers"] = containers
    assert "has no containers" in refusal(manifest).message


def test_a_container_that_is_none_is_refused() -> None:
    manifest = manifests()["Job"]
    manifest["spec"]["template"]["spec"]["containers"] = ["app"]
    assert "no list of dictionaries" in refusal(manifest).message


def test_a_train_job_without_a_runtime_is_refused() -> None:
    manifest = manifests()["TrainJob"]
    del manifest["spec"]["runtimeRef"]
    assert "no spec.runtimeRef" in refusal(manifest).message
