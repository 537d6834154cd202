"""The parameters of `kt.Compute`: what each takes, shows and refuses, and where it ends."""

import inspect

import pytest

import kubetorch as kt
from kubetorch.manifests import kinds
from kubetorch.manifests.scheduling import GPU_PRODUCT_LABEL as PRODUCT
from kubetorch.specs.endpoint import Endpoint
from kubetorch.specs.volume import VolumeSpec
from unit.manifests.users import manifests

NONE = object()

#: Parameter, value, what the property shows, and where which value lies in a Deployment.
POD = "spec.template.spec"
MAIN = f"{POD}.containers.0"
PLACES = [
    ("cpus", 2, "2", f"{MAIN}.resources.requests.cpu", "2"),
    ("cpus", "500m", "500m", f"{MAIN}.resources.requests.cpu", "500m"),
    ("memory", "512Mi", "512Mi", f"{MAIN}.resources.requests.memory", "512Mi"),
    ("disk_size", "10Gi", "10Gi", f"{MAIN}.resources.requests.ephemeral-storage", "10Gi"),
    ("gpus", 3, "3", f"{MAIN}.resources.limits", {"nvidia.com/gpu": "3"}),
    ("gpus", "2", "2", f"{MAIN}.resources.requests", {"nvidia.com/gpu": "2"}),
    ("gpus", 0, None, f"{MAIN}.resources", {}),
    ("gpus", "0", None, f"{POD}.tolerations", None),
    ("gpu_type", "L4", "L4", f"{MAIN}.resources.limits", {"nvidia.com/gpu": "1"}),
    ("gpu_type", "pool: big", "pool: big", f"{POD}.nodeSelector", {"pool": "big"}),
    (
        "gpu_type",
        f"{PRODUCT}: L4",
        "L4",
        f"{POD}.nodeSelector",
        {PRODUCT: "L4"},
    ),
    ("gpu_memory", "4Gi", "4Gi", "metadata.annotations.gpu-memory", "4Gi"),
    ("gpu_memory", "4Gi", "4Gi", f"{MAIN}.resources.limits", {"nvidia.com/gpu": "1"}),
    ("priority_class_name", "high", "high", f"{POD}.priorityClassName", "high"),
    ("node_selector", {"disk": "ssd"}, {"disk": "ssd"}, f"{POD}.nodeSelector", {"disk": "ssd"}),
    ("service_account_name", "mine", "mine", f"{POD}.serviceAccountName", "mine"),
    ("image_pull_policy", "Always", "Always", f"{MAIN}.imagePullPolicy", "Always"),
    ("working_dir", "/app", "/app", f"{MAIN}.workingDir", "/app"),
    ("launch_timeout", 603, 603, f"{MAIN}.startupProbe.failureThreshold", 120),
    ("shared_memory_limit", "2Gi", "2Gi", f"{POD}.volumes.0.emptyDir.sizeLimit", "2Gi"),
    ("replicas", 3, 3, "spec.replicas", 3),
    ("inactivity_ttl", "1h", "1h", "metadata.annotations.kubetorch~com/inactivity-ttl", "1h"),
    ("freeze", True, True, f"{MAIN}.securityContext", None),
    ("queue_name", "batch", "batch", "metadata.labels.kueue~x-k8s~io/queue-name", "batch"),
    ("queue", "batch", "batch", f"{POD}.schedulerName", "kai-scheduler"),
    ("server_port", 8000, 8000, f"{MAIN}.ports.0.containerPort", 8000),
]


def path(text):
    return tuple(part.replace("~", ".") for part in text.split("."))


def field_at(manifest, where):
    where = where.replace("nvidia.com/gpu", "nvidia~com/gpu")
    return kinds.get(manifest, path(where))


@pytest.mark.parametrize(("name", "value", "shown", "where", "expected_field"), PLACES)
def test_a_parameter_is_shown_as_it_is_kept_and_lies_in_the_manifest(
    name, value, shown, where, expected_field
):
    compute = kt.Compute()

    setattr(compute, name, value)

    assert getattr(compute, name) == shown
    assert field_at(compute.manifest, where) == expected_field


@pytest.mark.parametrize(("name", "value", "shown", "where", "expected_field"), PLACES)
def test_a_parameter_can_be_set_on_a_users_manifest(name, value, shown, where, expected_field):
    compute = kt.Compute.from_manifest(manifests()["Deployment"])

    setattr(compute, name, value)

    assert getattr(compute, name) == shown
    manifest = compute.manifest
    main = manifest["spec"]["template"]["spec"]["containers"][0]
    if where.endswith((".requests", ".limits", ".resources")):
        section = field_at(manifest, where)
        assert section.items() >= (expected_field or {}).items()
        assert main["resources"]["limits"]["memory"] == "1Gi"  # the user's own
    elif where.endswith("requests.cpu"):
        assert str(field_at(manifest, where)) == expected_field
    elif expected_field and not where.endswith(
        ("volumes.0.emptyDir.sizeLimit", "ports.0.containerPort")
    ):
        assert field_at(manifest, where) == expected_field


@pytest.mark.parametrize("name", [row[0] for row in PLACES])
def test_none_takes_a_parameter_back(name):
    compute = kt.Compute()
    before = (compute.manifest, getattr(compute, name))
    value = next(row[1] for row in PLACES if row[0] == name and row[2] is not None)

    setattr(compute, name, value)
    setattr(compute, name, None)

    assert (compute.manifest, getattr(compute, name)) == before


def test_every_parameter_of_the_contract_is_there_in_order():
    expected = """cpus memory disk_size gpus gpu_type priority_class_name gpu_memory namespace
        image labels annotations volumes node_selector service_template tolerations env_vars
        secrets freeze kubeconfig_path service_account_name image_pull_policy inactivity_ttl
        gpu_anti_affinity launch_timeout working_dir shared_memory_limit allowed_serialization
        replicas logging_config queue_name selector endpoint _skip_template_init queue
        concurrency max_queue num_proc dispatch data unknown"""

    assert list(inspect.signature(kt.Compute).parameters) == expected.split()


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "named", "right"),
    [
        ({"cpus": "2x"}, "cpus is '2x'", "thousandths"),
        ({"cpus": -1}, "cpus is -1", ""),
        ({"cpus": float("nan")}, "cpus is nan", ""),
        ({"cpus": ""}, "cpus is ''", ""),
        ({"cpus": [1]}, "cpus is [1]", ""),
        ({"cpus": "½"}, "cpus is '½'", ""),
        ({"memory": "4 GB"}, "memory is '4 GB'", "did you mean 4G?"),
        ({"memory": "4gb"}, "memory is '4gb'", "did you mean 4G?"),
        ({"memory": "-4Gi"}, "memory is '-4Gi'", ""),
        ({"memory": float("inf")}, "memory is inf", ""),
        ({"disk_size": "ten"}, "disk_size is 'ten'", ""),
        ({"shared_memory_limit": ""}, "shared_memory_limit is ''", ""),
        ({"gpus": "A10G:1"}, "gpus is 'A10G:1'", "gpus=1, gpu_type='A10G'"),
        ({"gpus": "0.5"}, "gpus is '0.5'", "gpu_memory"),
        ({"gpus": 0.5}, "gpus is 0.5", "gpu_memory"),
        ({"gpus": -1}, "gpus is -1", ""),
        ({"gpus": True}, "gpus is True", ""),
        ({"gpus": ""}, "gpus is ''", ""),
        ({"gpu_type": ""}, "gpu_type is ''", ""),
        ({"gpu_type": "NVIDIA A100"}, "gpu_type is 'NVIDIA A100'", "label"),
        ({"gpu_type": "pool:"}, "gpu_type is 'pool:'", "missing"),
        ({"gpu_type": 4}, "gpu_type is 4", ""),
        ({"gpu_memory": "all"}, "gpu_memory is 'all'", ""),
        ({"priority_class_name": "High"}, "priority_class_name is 'High'", ""),
        ({"priority_class_name": "a" * 254}, "priority_class_name is", "253"),
        ({"namespace": "a" * 64}, "namespace is", "63"),
        ({"namespace": "ünder"}, "namespace is 'ünder'", ""),
        ({"service_account_name": ""}, "service_account_name is ''", ""),
        ({"queue_name": "a" * 64}, "queue_name is", "63"),
        ({"queue": "my queue"}, "queue is 'my queue'", ""),
        ({"labels": {"team": "a" * 64}}, "labels['team'] is", "63"),
        ({"labels": {"team": "équipe"}}, "labels['team'] is 'équipe'", ""),
        (
            {"labels": {"kubetorch.com/service": "x"}},
            "labels has 'kubetorch.com/service'",
            "Kubetorch",
        ),
        ({"labels": "team=ml"}, "labels is 'team=ml'", "dictionary"),
        ({"annotations": {"a b": "x"}}, "annotations has the name 'a b'", ""),
        ({"annotations": {"a": {"b": 1}}}, "annotations['a'] is {'b': 1}", "text"),
        ({"annotations": ["a"]}, "annotations is ['a']", "dictionary"),
        ({"node_selector": {"disk": None}}, "node_selector['disk'] is None", ""),
        ({"node_selector": "disk=ssd"}, "node_selector is 'disk=ssd'", "dictionary"),
        ({"service_template": "spec"}, "service_template is 'spec'", "dictionary"),
        ({"service_template": {"spec": {1: 2}}}, "service_template.spec has the key 1", ""),
        ({"service_template": {"spec": object()}}, "service_template.spec is", ""),
        ({"service_template": {"spec": {"template": None}}}, "no pod template", ""),
        ({"tolerations": {"key": "a"}}, "tolerations is {'key': 'a'}", "list"),
        ({"tolerations": ["gpu"]}, "tolerations has 'gpu'", "dictionary"),
        ({"tolerations": [{"keys": "a"}]}, "tolerations has 'keys'", "did you mean key?"),
        ({"tolerations": [{"key": "a", "operator": "Is"}]}, "operator", "Exists, Equal"),
        ({"tolerations": [{"key": "a", "effect": "No"}]}, "effect", "NoSchedule"),
        (
            {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
            "tolerations has",
            "no value",
        ),
        ({"tolerations": [{"operator": "Equal"}]}, "tolerations has", "key is missing"),
        ({"tolerations": [{"key": 1}]}, "tolerations has {'key': 1}", "text"),
        (
            {"tolerations": [{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 5}]},
            "tolerationSeconds",
            "NoExecute",
        ),
        ({"env_vars": {"A=B": "x"}}, "env_vars has the name 'A=B'", ""),
        ({"env_vars": {"A": {"b": 1}}}, "env_vars['A'] is {'b': 1}", "text"),
        ({"volumes": "data"}, "volumes is 'data'", "list"),
        ({"volumes": [5]}, "volumes has 5", "kt.Volume"),
        ({"volumes": ["Data_1"]}, "Data_1", ""),
        ({"secrets": "huggingface"}, "secrets is 'huggingface'", "list"),
        ({"secrets": [5]}, "secrets has 5", "kt.Secret"),
        ({"freeze": "yes"}, "freeze is 'yes'", "True or False"),
        ({"gpu_anti_affinity": 1}, "gpu_anti_affinity is 1", "True or False"),
        ({"kubeconfig_path": 5}, "kubeconfig_path is 5", "path"),
        ({"image_pull_policy": "always"}, "image_pull_policy is 'always'", "did you mean Always"),
        ({"image_pull_policy": True}, "image_pull_policy is True", "IfNotPresent"),
        ({"inactivity_ttl": "-5m"}, "inactivity_ttl is '-5m'", "30m"),
        ({"launch_timeout": float("nan")}, "launch_timeout is nan", ""),
        ({"replicas": "two"}, "replicas is 'two'", "whole number"),
        ({"replicas": 20_000}, "replicas is 20000", "10000"),
        ({"selector": {}}, "selector is empty", ""),
        ({"selector": "app=x"}, "selector is 'app=x'", "dictionary"),
        ({"endpoint": "http://x"}, "endpoint is 'http://x'", "kt.Endpoint"),
        ({"selector": {"app": "x"}, "replicas": 2}, "selector", "replicas"),
        ({"selector": {"app": "x"}, "node_selector": {"a": "b"}}, "selector", "node_selector"),
        (
            {"gpu_type": "L4", "node_selector": {"nvidia.com/gpu.product": "A100"}},
            "gpu_type",
            "node_selector",
        ),
    ],
)
def test_what_is_impossible_is_refused_by_name_and_value(arguments, named, right):
    with pytest.raises(kt.SpecError) as caught:
        kt.Compute(**arguments)

    text = f"{caught.value.message} {caught.value.hint or ''}"
    assert named in text
    assert right in text


def test_what_is_no_image_is_refused_in_the_words_that_programs_expect():
    with pytest.raises(AttributeError, match="'str' object has no attribute 'image_id'"):
        kt.Compute(image="python:3.12")


def test_a_setter_that_refuses_changes_nothing():
    compute = kt.Compute(gpu_type="L4")

    with pytest.raises(kt.SpecError, match="node_selector"):
        compute.node_selector = {"nvidia.com/gpu.product": "A100"}

    assert compute.node_selector == {}


def test_a_number_of_bytes_that_is_hardly_meant_is_a_warning_at_the_users_line():
    with pytest.warns(UserWarning, match="12 bytes") as caught:
        compute = kt.Compute(memory=12)

    assert compute.memory == "12"
    assert caught[0].filename == __file__


# ------------------------------------------------------------------------------ several at a time


def test_labels_and_annotations_are_shown_with_our_own_and_without():
    compute = kt.Compute(labels={"team": "ml"}, annotations={"note": "x"}, inactivity_ttl="5m")

    assert compute.labels["team"] == "ml"
    assert compute.labels["kubetorch.com/template"] == "deployment"
    assert compute.user_labels == {"team": "ml"}
    assert compute.annotations["kubetorch.com/inactivity-ttl"] == "5m"
    assert compute.user_annotations == {"note": "x"}


def test_labels_of_pods_alone_are_added_and_removed():
    compute = kt.Compute(labels={"team": "ml", "old": "1"})

    compute.add_pod_template_labels({"zone": "a", "gone": "1"})
    compute.add_pod_template_labels({"zone": "b"}, remove_keys=["gone", "old"])

    of_pods = compute.pod_template["metadata"]["labels"]
    assert (of_pods["team"], of_pods["zone"]) == ("ml", "b")
    assert not {"gone", "old"} & of_pods.keys()
    assert "zone" not in compute.labels


def test_labels_of_a_manifests_pods_can_be_removed():
    compute = kt.Compute.from_manifest(manifests()["Deployment"])

    compute.add_pod_template_labels({}, remove_keys=["tier"])

    assert "tier" not in compute.pod_template["metadata"]["labels"]
    assert compute.labels["owner"] == "me"


def test_tolerations_of_the_same_key_are_replaced():
    first = {"key": "spot", "operator": "Exists"}
    compute = kt.Compute(tolerations=[first, {"key": "arm", "operator": "Exists"}], gpus=1)

    compute.add_tolerations([{"key": "spot", "operator": "Equal", "value": "yes", "effect": ""}])

    assert compute.tolerations == [
        {"key": "arm", "operator": "Exists"},
        {"key": "spot", "operator": "Equal", "value": "yes"},
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "dedicated", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"},
    ]
    assert compute.pod_spec["tolerations"] == compute.tolerations


def test_a_toleration_that_gpus_bring_is_not_there_twice():
    gpu_toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}

    assert (
        kt.Compute(gpus=1, tolerations=[gpu_toleration])
        .pod_spec["tolerations"]
        .count(gpu_toleration)
        == 1
    )


def test_the_service_template_goes_over_everything():
    template = {
        "metadata": {"labels": {"team": "theirs"}},
        "spec": {"template": {"spec": {"nodeSelector": {"disk": "ssd"}, "hostNetwork": True}}},
    }
    compute = kt.Compute(labels={"team": "ours"}, node_selector={"a": "b"})

    compute.service_template = template

    assert compute.service_template == template
    assert compute.labels["team"] == "theirs"
    assert compute.pod_spec["nodeSelector"] == {"a": "b", "disk": "ssd"}
    assert compute.pod_spec["hostNetwork"] is True


def test_the_environment_says_what_nobody_said(monkeypatch):
    monkeypatch.setenv("KT_GPU_ANTI_AFFINITY", "true")
    monkeypatch.setenv("KUBECONFIG", "/etc/one:/etc/two")

    assert kt.Compute().gpu_anti_affinity is True
    assert kt.Compute(gpu_anti_affinity=False).gpu_anti_affinity is False
    assert kt.Compute().kubeconfig_path == "/etc/one"
    monkeypatch.setenv("KT_GPU_ANTI_AFFINITY", "perhaps")
    with pytest.raises(kt.ConfigError, match="KT_GPU_ANTI_AFFINITY is 'perhaps'"):
        kt.Compute()


def test_the_kubeconfig_is_kept_as_given_and_shown_in_full():
    compute = kt.Compute(kubeconfig_path="~/.kube/mine")

    assert compute.kubeconfig_path.endswith("/.kube/mine")
    assert not compute.kubeconfig_path.startswith("~")
    assert compute.annotations["kubetorch.com/kubeconfig-path"] == "~/.kube/mine"


@pytest.fixture
def settings():
    yield kt.config
    kt.config.unset("volumes")
    kt.config.unset("queue")


def test_volumes_and_queue_of_the_settings_are_those_of_computes_that_do_not_say(settings):
    settings.volumes = ["shared"]
    settings.queue = "batch"

    compute = kt.Compute()

    assert (compute.volumes, compute.queue) == (["shared"], "batch")
    assert compute.pod_spec["schedulerName"] == "kai-scheduler"
    assert kt.Compute(volumes=[], queue_name="mine").volumes == []
    assert kt.Compute(queue_name="mine").queue is None
    assert kt.Compute.from_manifest(manifests()["Deployment"]).volumes == []


def test_volumes_and_secrets_that_are_set_are_added():
    compute = kt.Compute(volumes=["data"], secrets=["token"])

    compute.volumes = ["models"]
    compute.secrets = ["key"]

    assert compute.volumes == ["data", "models"]
    assert [secret.name for secret in compute.secrets] == ["token", "key"]
    sources = [source["secretRef"]["name"] for source in compute._container()["envFrom"]]
    assert sources == ["token", "key"]


def test_two_volumes_at_one_place_are_refused_where_they_are_given():
    compute = kt.Compute.from_manifest(manifests()["Deployment"])

    with pytest.raises(kt.SpecError, match="two volumes are mounted at /scratch"):
        compute.volumes = [VolumeSpec("data", "/scratch", claim="data")]
    assert compute.volumes == []


# -------------------------------------------------------------------------------------- pools


def test_a_selector_alone_is_a_pool_without_a_manifest():
    compute = kt.Compute(selector={"app": "workers"}, endpoint=Endpoint(url="lb.ns.svc:8080"))

    assert compute.selector_only
    assert compute.manifest is None
    assert compute.deployment_mode == "deployment"
    assert compute.kind == "Deployment"
    assert compute.pod_spec == compute.pod_template == compute.resources == {}
    assert compute.labels == compute.annotations == {}
    assert compute.tolerations == compute.volumes == compute.secret_volumes == []
    assert (compute.gpus, compute.image.image_id, compute.server_image) == (None, None, "")
    assert compute.endpoint == "lb.ns.svc:8080"


def test_a_selector_with_resources_is_a_service_of_those_pods():
    compute = kt.Compute(selector={"app": "workers"}, cpus=1, replicas=2)

    assert not compute.selector_only
    assert compute.selector == {"app": "workers"}
    assert compute.manifest["kind"] == "Deployment"


def test_a_secret_is_declared_by_its_provider_by_itself_or_by_its_name(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "w-123")
    monkeypatch.setenv("HF_TOKEN", "hf-123")

    token = kt.Secret(name="hf-token", env_var="HF_TOKEN")
    compute = kt.Compute(secrets=["wandb", token, "existing"])

    assert [secret.name for secret in compute.secrets] == ["wandb", "hf-token", "existing"]
    variables = {variable["name"]: variable["valueFrom"] for variable in compute.secret_env_vars}
    assert variables["HF_TOKEN"]["secretKeyRef"]["name"] == "kt.secret.global.hf-token"
    assert "123" not in str(compute.manifest) + repr(compute) + repr(compute.to_spec())
    assert kt.Compute.from_spec(compute.to_spec()) == compute
    with pytest.raises(kt.SpecError, match="OPENAI_API_KEY"):
        kt.Compute(secrets=["openai"])


def test_the_older_name_of_the_shared_memory_limit_is_deprecated():
    compute = kt.Compute(shared_memory_limit="1Gi")

    with pytest.warns(DeprecationWarning, match="shared_memory_limit") as caught:
        compute.shm_size_limit = "2Gi"
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="shared_memory_limit"):
        assert compute.shm_size_limit == compute.shared_memory_limit == "2Gi"


# --------------------------------------------------------------------------------------- images


def test_steps_that_are_added_to_an_image_later_count():
    image = kt.Image(image_id="python:3.12-slim").pip_install("numpy")
    compute = kt.Compute(image=image)

    image.pip_install("pandas")

    assert compute.image is image
    assert len(compute.to_spec().image.steps) == 2
    assert compute._container()["image"] == compute.server_image == "python:3.12-slim"


def test_the_image_of_a_manifest_can_be_added_to():
    compute = kt.Compute.from_manifest(manifests()["Deployment"])

    compute.image.pip_install("numpy")

    spec = compute.to_spec().image
    assert (spec.image_id, len(spec.steps)) == ("registry.example/mine:1", 1)
    job_compute = kt.Compute.from_manifest(manifests()["Job"], image=kt.Image(image_id="mine:2"))
    assert job_compute.server_image == "mine:2"


def test_the_server_image_can_be_set_and_keeps_the_steps():
    compute = kt.Compute(image=kt.Image(image_id="a:1", python_path="/p").pip_install("numpy"))

    compute.server_image = "b:2"

    assert compute.server_image == "b:2"
    assert (compute.python_path, compute.image_install_cmd) == ("/p", None)
    assert len(compute.image.to_spec().steps) == 1
    with pytest.raises(kt.SpecError, match="B:2"):
        compute.server_image = "B:2"


def test_the_default_image_is_that_of_the_settings():
    assert kt.Compute().server_image == "ghcr.io/kubetorch/pod:latest"
    kt.config.default_image = "mine/pod:1"
    try:
        assert kt.Compute().server_image == "mine/pod:1"
        assert kt.Compute(image=kt.Image().pip_install("numpy")).server_image == "mine/pod:1"
        assert kt.Compute(image=kt.Image(image_id="other:1")).server_image == "other:1"
    finally:
        kt.config.unset("default_image")
