"""The chart: what it renders to, what it refuses, and that it gives the rights that are needed."""

import json
import re

import pytest
import yaml

from contract.chart import goldens
from kubetorch import errors
from kubetorch._version import __version__
from kubetorch.controller.cluster.service import Settings
from kubetorch.install import values
from kubetorch.install.chart import FOLDER, Chart
from kubetorch.install.tuning import TIMING
from kubetorch.manifests.kinds import KINDS


def objects(values=None, namespace="kubetorch"):
    return Chart().render(values or {}, namespace=namespace)


def named(manifests, kind, name):
    return next(
        manifest
        for manifest in manifests
        if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name)
    )


@pytest.mark.parametrize("file", goldens.VALUES, ids=lambda path: path.stem)
def test_it_renders_to_what_is_on_record(file):
    golden = file.parents[1] / "goldens" / file.name
    assert goldens.render(file) == golden.read_text(), "see contract/chart/goldens.py"


def test_its_versions_are_those_of_the_package():
    about = Chart().about
    assert (about["version"], about["appVersion"]) == (__version__, __version__)


@pytest.mark.parametrize(
    ("values", "expected_message"),
    [
        ({"replica": 2}, "replica is not a value of the chart; did you mean replicas?"),
        ({"image": {"tag": "a b"}}, "image.tag is 'a b'; it must match"),
        ({"replicas": 0}, "replicas is 0; it must be at least 1"),
        ({"replicas": "2"}, "replicas is '2'; it must be of type integer"),
        ({"logLevel": "loud"}, "logLevel is 'loud'; it must be one of debug, info"),
        ({"podLabels": {"a": 1}}, "podLabels.a is 1; it must be of type string"),
        ({"watchNamespaces": ["Team"]}, "watchNamespaces[0] is 'Team'; it must match"),
        ({"image": {"repository": None}}, "image.repository is missing"),
        ({"store": {"bucket": "shelf"}}, "store.bucket is 'shelf'; it must match"),
    ],
)
def test_a_wrong_value_is_refused_and_named(values, expected_message):
    with pytest.raises(errors.ConfigError, match="values of the chart cannot be used") as raised:
        objects(values)
    assert expected_message in str(raised.value)


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        (
            {"kubetorchConfig": {"deployment_namespaces": ["team"]}},
            ["kubetorchConfig.deployment_namespaces was a value of 0.5: use watchNamespaces"],
        ),
        (
            {"dataStore": {"storage": {"size": "1Gi"}, "tolerations": [{}]}, "metrics": {}},
            [
                "dataStore.storage.size was a value of 0.5: use blobs.persistence.size",
                "dataStore.tolerations was a value of 0.5: use tolerations",
                "metrics was a value of 0.5, and has no successor: the chart installs no",
            ],
        ),
        (
            {"kubetorchController": {"ttl": {"podMonitor": {"enabled": True}}}},
            ["kubetorchController.ttl.podMonitor.enabled was a value of 0.5, and has no"],
        ),
        (
            {"kubetorchConfig": {"serviceAccountAnnotations": {"a": "b"}}, "replicas": 0},
            ["use workloads.serviceAccountAnnotations", "replicas is 0; it must be at least 1"],
        ),
    ],
)
def test_a_value_of_the_chart_of_0_5_is_refused_with_its_new_name(values, lines):
    with pytest.raises(errors.ConfigError, match="values of the chart cannot be used") as raised:
        objects(values)
    for line in lines:
        assert line in str(raised.value)
    assert len(str(raised.value.message).splitlines()) == len(lines) + 1
    nothing = {key: None for key in values if key != "replicas"}
    assert objects(nothing) == objects(), "null takes it away"


def test_the_successors_of_earlier_values_are_values_of_the_chart_and_in_its_document():
    document = (FOLDER.parents[2] / "docs" / "install.md").read_text()
    assert not values.EARLIER_SECTIONS & set(Chart().defaults)
    for path, successors in values.SUCCESSORS.items():
        assert f"`{path}`" in document
        for successor in successors:
            assert f"`{successor}`" in document
            value = Chart().defaults
            for key in successor.split("."):
                value = value[key]
    for path in values.WITHOUT_SUCCESSOR:
        assert f"`{path}`" in document or f"`{path}.*`" in document, path


def test_the_controller_is_told_the_annotations_of_the_accounts_of_pods():
    annotations = {"eks.amazonaws.com/role-arn": 'arn:aws:iam::1:role/a&"b"'}
    chart_values = {"workloads": {"serviceAccountAnnotations": annotations}}
    deployment = named(objects(chart_values), "Deployment", "kubetorch-controller")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    variables |= {"POD_NAME": "controller-0"}
    assert Settings.read(variables).account_annotations == annotations


def test_the_controller_is_told_the_bucket_of_its_store_and_the_secret_has_the_credentials():
    address, endpoint = "s3://shelf/data", "https://minio.example.com:9000"
    store = {"bucket": address, "endpoint": endpoint, "secretName": "store-credentials"}
    deployment = named(objects({"store": store}), "Deployment", "kubetorch-controller")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    settings = Settings.read(variables | {"POD_NAME": "controller-0"})
    assert (settings.store_bucket, settings.store_endpoint) == (address, endpoint)
    secret_keys = [
        variable["valueFrom"]["secretKeyRef"]
        for variable in container["env"]
        if "secretKeyRef" in variable.get("valueFrom", {})
    ]
    assert {key["name"] for key in secret_keys} == {"store-credentials"}
    assert [key["key"] for key in secret_keys if not key.get("optional")] == [
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
    ]


def test_without_a_bucket_the_store_is_on_the_disk_and_no_credentials_are_read():
    deployment = named(objects(), "Deployment", "kubetorch-controller")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    names = {variable["name"] for variable in container["env"]}
    assert not {name for name in names if name.startswith(("AWS_", "KT_STORE_"))}


def test_two_replicas_need_a_volume_that_both_can_mount():
    persistence = {"enabled": True, "accessMode": "ReadWriteOnce"}
    with pytest.raises(errors.ConfigError, match="accessMode must be ReadWriteMany"):
        objects({"replicas": 2, "blobs": {"persistence": persistence}})


def test_every_value_has_a_place_in_the_schema_and_is_used_by_a_template():
    schema = json.loads((FOLDER / "values.schema.json").read_text())
    templates = "".join(path.read_text() for path in (FOLDER / "templates").iterdir())
    for name in Chart().defaults:
        assert name in schema["properties"]
        assert f".Values.{name}" in templates, f"{name} is accepted and ignored"
    # helm itself puts `global` among the values of every chart.
    assert set(schema["properties"]) == {*Chart().defaults, "global"}


def test_the_notes_lead_to_an_ingress_that_clients_take():
    host, secret = {"host": "kt.example.com"}, {"tlsSecretName": "kt"}
    for ingress, has_line, warns in (
        (host, False, False),
        ({**host, "enabled": True}, True, True),
        ({**host, **secret, "enabled": True}, True, False),
    ):
        notes = Chart().notes({"ingress": ingress}, namespace="kubetorch")
        assert ("kt config set api_url https://kt.example.com" in notes) == has_line
        assert ("has no ingress.tlsSecretName" in notes) == warns
        assert "http://" not in notes


def test_helm_is_told_why_an_uninstall_failed_before_it_waits_no_longer():
    job = (FOLDER / "templates" / "uninstall.yaml").read_text()
    (deadline,) = re.findall(r"activeDeadlineSeconds: (\d+)", job)
    helm_waits = 300
    assert TIMING.removal_seconds < int(deadline) < helm_waits


def test_the_controller_may_do_with_each_kind_what_a_deploy_needs():
    rules = named(objects(), "ClusterRole", "kubetorch-controller.kubetorch")["rules"]
    for kind in KINDS.values():
        verbs = {
            verb
            for rule in rules
            if kind.group in rule["apiGroups"] and kind.plural in rule["resources"]
            for verb in rule["verbs"]
        }
        assert {"get", "list", "watch", "create", "patch", "delete"} <= verbs, kind


def test_it_has_no_right_over_everything_and_grants_none():
    for manifest in objects():
        if (
            manifest["kind"] in ("Role", "ClusterRole")
            and manifest["metadata"]["name"] != "kubetorch-admin"
        ):
            for rule in manifest["rules"]:
                assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
                assert not {"escalate", "impersonate"} & set(rule["verbs"])
    admin = named(objects(), "ClusterRole", "kubetorch-admin")
    ours, *kinds = admin["rules"]
    assert ours["apiGroups"] == ["kubetorch.com"]
    for rule in kinds:  # what services consist of, and nothing that others keep
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        assert not {"secrets", "rolebindings", "clusterroles"} & set(rule["resources"])


def test_who_may_only_look_can_neither_call_nor_read_secrets():
    view = named(objects(), "ClusterRole", "kubetorch-view")
    resources = {name for rule in view["rules"] for name in rule["resources"]}
    verbs = {verb for rule in view["rules"] for verb in rule["verbs"]}
    assert verbs == {"get", "list", "watch"}
    assert not {"kubetorchworkloads/call", "kubetorchworkloads/exec"} & resources
    assert "kubetorchworkloads/secrets" not in resources


def test_with_watched_namespaces_secrets_are_readable_nowhere_else():
    manifests = objects({"watchNamespaces": ["team"]})
    rules = named(manifests, "ClusterRole", "kubetorch-controller.kubetorch")["rules"]
    assert not any("secrets" in rule["resources"] for rule in rules)
    roles = [manifest for manifest in manifests if manifest["kind"] == "Role"]
    everything = [
        manifest["metadata"]["namespace"]
        for manifest in roles
        if any(
            "secrets" in rule["resources"] and "list" in rule["verbs"] for rule in manifest["rules"]
        )
    ]
    assert everything == ["team"]


def rendered(values, namespace="kubetorch"):
    """All objects, with those that are for helm's hooks."""
    chart = Chart()
    values = chart.values(values)
    about = {key[:1].upper() + key[1:]: value for key, value in chart.about.items()}
    release = {"Name": "kubetorch", "Namespace": namespace, "Service": "Helm"}
    data = {"Values": values, "Chart": about, "Release": release}
    names = sorted(f"templates/{path.name}" for path in (FOLDER / "templates").glob("*.yaml"))
    texts = (chart.templates.render(name, data) for name in names)
    loads = (yaml.load_all(text, Loader=yaml.CSafeLoader) for text in texts)
    return [manifest for manifests in loads for manifest in manifests if manifest]


#: What is allowed in every namespace although watchNamespaces names some: it reads what lies in
#: none, asks who somebody is, or is about the kind itself.
CLUSTER_WIDE = {
    "apps/deployments": {"list"},
    "authentication.k8s.io/tokenreviews": {"create"},
    "authorization.k8s.io/subjectaccessreviews": {"create"},
    "apiextensions.k8s.io/customresourcedefinitions": {"get", "list", "watch", "patch", "delete"},
    "kubetorch.com/kubetorchworkloads": {"list"},
    "kubetorch.com/kubetorchworkloads/status": {"get"},
}
READ = {"get", "list", "watch"}
READ_CLUSTER_WIDE = {
    *("/configmaps", "/namespaces", "/nodes", "/persistentvolumes"),
    *("karpenter.sh/nodepools", "kueue.x-k8s.io/clusterqueues", "node.k8s.io/runtimeclasses"),
    *("scheduling.k8s.io/priorityclasses", "scheduling.run.ai/queues"),
    *("storage.k8s.io/storageclasses", "trainer.kubeflow.org/clustertrainingruntimes"),
}


def test_with_watched_namespaces_nobody_may_change_anything_elsewhere():
    manifests = rendered(
        {"watchNamespaces": ["team"], "serviceMonitor": {"enabled": True}}, "other"
    )
    bound = [manifest for manifest in manifests if manifest["kind"] == "ClusterRoleBinding"]
    subjects = {subject["name"] for binding in bound for subject in binding["subjects"]}
    assert subjects == {"kubetorch-controller", "kubetorch-metrics", "kubetorch-uninstall"}
    for binding in bound:
        for rule in named(manifests, "ClusterRole", binding["roleRef"]["name"])["rules"]:
            for resource in (f"{a}/{b}" for a in rule["apiGroups"] for b in rule["resources"]):
                allowed = READ if resource in READ_CLUSTER_WIDE else CLUSTER_WIDE[resource]
                assert set(rule["verbs"]) <= allowed, (binding["metadata"]["name"], resource)
                if "customresource" in resource and "delete" in rule["verbs"]:
                    assert rule["resourceNames"] == ["kubetorchworkloads.kubetorch.com"]
    admin = [
        (manifest["kind"], manifest["metadata"].get("namespace"))
        for manifest in manifests
        if manifest["kind"].endswith("Binding") and manifest["roleRef"]["name"] == "kubetorch-admin"
    ]
    assert admin == [("RoleBinding", "team")]


@pytest.mark.parametrize("namespace", ["2024", "on", "null", "1e3", "0x1f"])
def test_a_namespace_is_text_whatever_yaml_takes_it_for(namespace):
    values = {"watchNamespaces": ["123", namespace], "serviceMonitor": {"enabled": True}}
    for file in goldens.VALUES:
        chart_values = {**yaml.safe_load(file.read_text()), **values}
        manifests = rendered(chart_values, namespace)
        places = {manifest["metadata"].get("namespace") for manifest in manifests}
        assert places == {None, "123", namespace}
        for manifest in manifests:
            labels = manifest["metadata"]["labels"]
            assert labels["kubetorch.com/install-namespace"] == namespace
            for subject in manifest.get("subjects") or ():
                assert subject.get("namespace", namespace) == namespace
        deployment = named(manifests, "Deployment", "kubetorch-controller")
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        assert {"name": "KT_INSTALL_NAMESPACE", "value": namespace} in container["env"]


def test_the_definition_is_kept_by_helm_since_all_services_would_go_with_it():
    definition = named(objects(), "CustomResourceDefinition", "kubetorchworkloads.kubetorch.com")
    assert definition["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_the_controller_runs_with_as_little_as_pod_security_restricted_allows():
    pod = named(objects(), "Deployment", "kubetorch-controller")["spec"]["template"]["spec"]
    container = pod["containers"][0]["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_hooks_are_for_helm_alone():
    assert "helm.sh/hook" in (FOLDER / "templates/uninstall.yaml").read_text()
    assert not any(manifest["kind"] == "Job" for manifest in objects())


def test_the_notes_say_where_it_is():
    assert "install_namespace" not in Chart().notes({}, namespace="kubetorch")
    assert "kt config set install_namespace team" in Chart().notes({}, namespace="team")


def test_an_object_has_the_labels_by_which_an_uninstall_knows_it():
    for manifest in yaml.safe_load_all(goldens.render(goldens.VALUES[0])):
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/managed-by"] == "kubetorch"
        assert labels["kubetorch.com/install-namespace"] == "kubetorch"
