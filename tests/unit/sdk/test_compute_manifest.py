"""`kt.Compute.from_manifest` and `from_template`: whatever runs pods is a compute."""

import copy

import pytest
import yaml

import kubetorch as kt
from kubetorch.specs.endpoint import Endpoint
from unit.manifests.users import manifests

KINDS = sorted(manifests())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_from_a_dictionary_that_stays_as_it_is(kind):
    manifest = manifests()[kind]
    before = copy.deepcopy(manifest)

    compute = kt.Compute.from_manifest(manifest)

    assert compute.service_name == compute.name == manifest["metadata"].get("name")
    assert compute.kind == manifest["kind"]
    assert compute.api_version == manifest["apiVersion"]
    assert compute.env_vars["MINE"] in ("1", "")
    compute.cpus = "3"
    assert compute.resources["requests"]["cpu"] == "3"
    assert manifest == before


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_from_a_file(kind, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(manifests()[kind]))

    compute = kt.Compute.from_manifest(str(file))

    assert compute == kt.Compute.from_manifest(file) == kt.Compute.from_manifest(manifests()[kind])


def test_the_mode_is_the_lower_case_of_the_kind_but_for_knative():
    modes = {kind: kt.Compute.from_manifest(manifests()[kind]).deployment_mode for kind in KINDS}

    assert modes["Service"] == "knative"
    assert modes["PyTorchJob"] == "pytorchjob"
    assert modes["StatefulSet"] == "statefulset"


def test_the_namespace_and_name_of_the_manifest_are_those_of_the_service():
    manifest = manifests()["Deployment"]
    manifest["metadata"] |= {"name": "", "namespace": "there"}

    compute = kt.Compute.from_manifest(manifest)

    assert (compute.namespace, compute.service_name) == ("there", None)
    compute.namespace = "elsewhere"
    assert compute.manifest["metadata"]["namespace"] == "elsewhere"


def test_a_service_is_called_like_its_manifest():
    manifest = manifests()["Deployment"]

    remote = kt.fn(len, name="other")
    remote.compute = kt.Compute.from_manifest(manifest)

    assert remote.service_name == "mine"
    assert remote.compute.manifest["metadata"]["name"] == "mine"


def test_the_job_that_is_selected_gives_a_name():
    manifest = manifests()["PyTorchJob"]
    manifest["metadata"]["name"] = ""

    labels = {"training.kubeflow.org/job-name": "ddp"}
    assert kt.Compute.from_manifest(manifest, selector=labels).service_name == "ddp"


def test_selector_endpoint_and_image_are_taken():
    compute = kt.Compute.from_manifest(
        manifests()["RayCluster"],
        selector={"app": "mine"},
        endpoint=Endpoint(selector={"app": "mine", "role": "head"}),
    )

    assert compute.selector == {"app": "mine"}
    assert compute.to_spec().endpoint == Endpoint(selector={"app": "mine", "role": "head"})
    assert compute.endpoint is None
    compute.endpoint = Endpoint(url="my-svc.my-ns.svc.cluster.local:8080")
    assert compute.endpoint == "my-svc.my-ns.svc.cluster.local:8080"


def test_other_kinds_say_where_their_pods_are():
    manifest = {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": "mine"},
        "spec": {"tasks": [{"template": {"spec": {"containers": [{"name": "a", "image": "b"}]}}}]},
    }

    with pytest.raises(kt.SpecError, match=r'pod_template_path="spec.tasks.0.template"'):
        kt.Compute.from_manifest(manifest)
    dotted = kt.Compute.from_manifest(manifest, pod_template_path="spec.tasks.0.template")
    listed = kt.Compute.from_manifest(manifest, pod_template_path=["spec", "tasks", 0, "template"])

    assert dotted == listed
    assert dotted.pod_spec["containers"][0]["command"] == ["/kubetorch/bin/kt-agent"]
    with pytest.raises(kt.SpecError, match="pod_template_path"):
        kt.Compute.from_manifest(manifest, pod_template_path="")


def test_a_template_is_the_object_of_a_service():
    compute = kt.Compute.from_template({"resource": kt.Compute(cpus=2, gpus=1).manifest})

    assert (compute.cpus, compute.gpus, compute.service_name) == ("2", "1", None)
    with pytest.raises(kt.SpecError, match="'resource'"):
        kt.Compute.from_template({"manifest": {}})


# ------------------------------------------------------------------------------------- bad input


def without(*keys, kind="Deployment"):
    manifest = manifests()[kind]
    node = manifest
    for key in keys[:-1]:
        node = node[key]
    del node[keys[-1]]
    return manifest


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (None, "manifest is None"),
        (5, "manifest is 5"),
        ("", "manifest is ''"),
        ([], r"manifest is \[\]"),
        ({}, "'apiVersion'"),
        (without("kind"), "'kind'"),
        (without("apiVersion"), "'apiVersion'"),
        (without("spec", "template"), "no pod template"),
        (without("spec", "template", "spec", "containers"), "no containers"),
        ({"apiVersion": "v1", "kind": "Service", "spec": {}}, "kind 'Service' of 'v1'"),
        ({"apiVersion": "x.io/v1", "kind": "Thing", "spec": {}}, "kind 'Thing'"),
    ],
)
def test_what_is_no_manifest_is_refused(manifest, message):
    with pytest.raises(kt.SpecError, match=message):
        kt.Compute.from_manifest(manifest)


def test_a_manifest_with_two_templates_is_refused():
    manifest = manifests()["JobSet"]
    jobs = manifest["spec"]["replicatedJobs"]
    jobs.append(copy.deepcopy(jobs[0]))

    with pytest.raises(kt.SpecError, match=r"2 pod templates.*pod_template_path"):
        kt.Compute.from_manifest(manifest)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: [", "no valid YAML"),
        ("a: 1\n b: 2\n", "line 2"),
        ("", "no object"),
        ("- a\n", "no object"),
        ("kind: A\n---\nkind: B\n", r"2 documents \(A, B\)"),
        ("kind: A\n---\ntext\n", r"2 documents \(A, no object\)"),
        ("[" * 5000, "nested more than 100 levels"),
        ("\x00", "no valid YAML"),
    ],
)
def test_a_broken_file_is_refused_by_its_path(text, message, tmp_path):
    file = tmp_path / "broken.yaml"
    file.write_text(text)

    with pytest.raises(kt.SpecError, match=message) as caught:
        kt.Compute.from_manifest(file)
    assert str(file) in caught.value.message


def test_a_missing_file_is_refused_with_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(kt.SpecError, match="No such file") as caught:
        kt.Compute.from_manifest("absent.yaml")
    assert str(tmp_path) in caught.value.hint


def test_a_name_that_no_service_can_have_is_refused():
    manifest = manifests()["Deployment"]
    for name in ("Mine", "a.b", "a" * 64):
        manifest["metadata"]["name"] = name
        with pytest.raises(kt.SpecError, match="63"):
            kt.Compute.from_manifest(manifest)


def test_a_training_job_of_several_pods_is_distributed_however_its_number_is_said():
    compute = kt.Compute.from_manifest(manifests()["PyTorchJob"])
    compute.replicas = 1
    assert compute.distributed_config is None
    compute.replicas = 4
    assert compute.distributed_config["distribution_type"] == "spmd"
    assert compute.distributed_config["workers"] == 4
    compute.distribute("pytorch", workers=3)
    compute.replicas = 2
    assert compute.distributed_config["distribution_type"] == "pytorch"
    compute.distributed_config = None
    compute.replicas = 3
    assert compute.distributed_config is None, "the user took it back"


def test_a_deployment_is_distributed_only_if_that_is_said():
    compute = kt.Compute.from_manifest(manifests()["Deployment"])
    compute.replicas = 4
    assert compute.distributed_config is None
