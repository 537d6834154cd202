"""Objects of a user's own: a typo in one, what a deploy makes of it, what a teardown leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import byo
from cluster.conftest import Installed, Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

#: Seconds from `.to()` to the error: two, and what a machine takes that has other work, too.
BUDGET = 10.0
#: Seconds that a program has, on such a machine.
PATIENCE = 250.0


def deployment(name: str) -> dict[str, Any]:
    """A Deployment with a container beside the one that becomes the agent's."""
    labels = {"app": name}
    side = {"name": "side", "image": byo.IMAGE, "command": ["sleep", "infinity"]}
    pods = byo.template(labels=labels)
    pods["spec"]["containers"].append({**side, "imagePullPolicy": "IfNotPresent"})
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": pods}
    manifest = byo.manifest("apps/v1", "Deployment", spec)
    return manifest | {"metadata": {"name": name, "labels": {"team": "research"}}}


TYPOS = """
    import json, sys, time
    import kubetorch as kt

    def hello():
        return 1

    for text in sys.argv[1:]:
        manifest, begun = json.loads(text), time.monotonic()
        try:
            compute = kt.Compute.from_manifest(manifest)
            kt.fn(hello, name=manifest["metadata"]["name"]).to(compute)
        except kt.SpecError as error:
            found = [error.message, error.hint, time.monotonic() - begun]
            print("found", json.dumps(found))
"""


def test_a_typo_in_a_manifest_is_an_error_at_once_and_leaves_nothing(
    bringing: Installed, kubectl: Kubectl, tmp_path: Path
) -> None:
    field, typed, amount, port = map(deployment, ("typo", "typed", "amount", "port"))
    field["spec"]["template"]["spec"]["tolerationz"] = []
    typed["spec"]["minReadySeconds"] = "soon"
    main = amount["spec"]["template"]["spec"]["containers"][0]
    main["resources"]["requests"]["ephemeral-storage"] = "lots"
    port["spec"]["template"]["spec"]["containers"][0]["ports"] = [{"containerPort": 32300}]
    texts = [json.dumps(manifest) for manifest in (field, typed, amount, port)]
    printed = bringing.python(TYPOS, tmp_path, *texts, timeout=PATIENCE)
    refusals = [json.loads(line[6:]) for line in printed.splitlines() if line.startswith("found ")]
    assert len(refusals) == len(texts), printed
    (typo, _), (kind, _), (lots, _), (taken, _) = ((refusal[0], refusal[1]) for refusal in refusals)
    assert "there is no field spec.template.spec.tolerationz" in typo
    assert refusals[0][1] == "did you mean tolerations?"
    assert "spec.minReadySeconds: expected numeric (int or float), got string" in kind
    assert "resources.requests.ephemeral-storage 'lots'" in lots
    assert "32300" in taken
    assert max(seconds for *_, seconds in refusals) < BUDGET
    names = kubectl("get", "deployments,services", "-n", bringing.namespace, "-o", "name")
    assert not {name for name in names.split() if name.rpartition("/")[2] in printed}


READ = """
    import os, sys
    import kubetorch as kt

    def read():
        return os.environ["CPU"], open("/etc/info/memory").read()

    remote = kt.fn(read, name="named").to(kt.Compute.from_manifest("manifest.yaml"))
    print("read", *remote())
"""


def test_references_follow_the_container_that_is_replaced_where_it_runs_already(
    bringing: Installed, kubectl: Kubectl, tmp_path: Path
) -> None:
    manifest = deployment("named")
    pods = manifest["spec"]["template"]
    pods["metadata"]["annotations"] = {"kubectl.kubernetes.io/default-container": "main"}
    main, item = pods["spec"]["containers"][0], {"path": "memory"}
    main["resources"] = {"requests": {"cpu": "20m", "memory": "64Mi"}}
    field = {"containerName": "main", "resource": "requests.cpu", "divisor": "1m"}
    main["env"] = [{"name": "CPU", "valueFrom": {"resourceFieldRef": field}}]
    main["volumeMounts"] = [{"name": "info", "mountPath": "/etc/info"}]
    item["resourceFieldRef"] = {"containerName": "main", "resource": "requests.memory"}  # type: ignore[assignment]
    pods["spec"]["volumes"] = [{"name": "info", "downwardAPI": {"items": [item]}}]
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump(manifest))
    kubectl("apply", "-n", bringing.namespace, "-f", str(tmp_path / "manifest.yaml"))
    for _ in range(2):  # the second deploy finds what the first has made
        printed = bringing.python(READ, tmp_path, timeout=PATIENCE)
        assert f"read 20 {64 * 1024 * 1024}" in printed
        live_template = json.loads(
            kubectl("get", "deployment/named", "-n", bringing.namespace, "-o", "json")
        )["spec"]["template"]
        names = [container["name"] for container in live_template["spec"]["containers"]]
        assert sorted(names) == ["kubetorch", "side"]
        annotations = live_template["metadata"]["annotations"]
        assert annotations["kubectl.kubernetes.io/default-container"] == "kubetorch"


DEPLOY = """
    import json, sys
    import kubetorch as kt

    def hello():
        return 1

    if __name__ == "__main__":
        manifest = json.load(open("object.json"))
        if sys.argv[1] == "template":
            compute = kt.Compute.from_template({"resource": manifest})
        else:
            compute = kt.Compute.from_manifest(manifest)
        name = manifest["metadata"]["name"]
        kt.fn(hello, name=name).to(compute)
        compute.cpus = "30m"
        print("called", kt.fn(hello, name=name).to(compute)())
"""


@pytest.mark.parametrize("form", ["manifest", "template"])
def test_a_teardown_puts_a_user_s_object_back_but_for_what_others_have_changed_since(
    bringing: Installed, kubectl: Kubectl, tmp_path: Path, form: str
) -> None:
    manifest, namespace_option = deployment(f"own-{form}"), ("-n", bringing.namespace)
    name = f"deployment/own-{form}"
    file = tmp_path / "object.json"
    file.write_text(json.dumps(manifest))
    kubectl("apply", *namespace_option, "-f", str(file))

    def live_object() -> dict[str, Any]:
        live_manifest: dict[str, Any] = json.loads(
            kubectl("get", name, *namespace_option, "-o", "json")
        )
        return live_manifest

    before = live_object()
    if form == "template":
        file.write_text(json.dumps(before))
    assert "called 1" in bringing.python(DEPLOY, tmp_path, form, timeout=PATIENCE)
    assert live_object()["spec"] != before["spec"]
    kubectl("scale", name, *namespace_option, "--replicas=2")
    kubectl("annotate", name, *namespace_option, "note=mine")
    # What deletes the service deletes nothing of the user's.
    assert "ownerReferences" not in live_object()["metadata"]

    printed = bringing.run("kt", "teardown", f"own-{form}", "-y")

    assert f"left: Deployment own-{form}, as it was before" in printed
    after = live_object()
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["spec"] == {**before["spec"], "replicas": 2}
    assert after["metadata"]["labels"] == before["metadata"]["labels"]
    # Its controller may write the revision later than `before` was read.
    revision = "deployment.kubernetes.io/revision"
    expected_annotations = {"note", revision} | before["metadata"]["annotations"].keys()
    assert after["metadata"]["annotations"].keys() == expected_annotations
    # Nobody else owns what the user applied, so that their next apply is no conflict.
    file.write_text(json.dumps(manifest | {"spec": {**manifest["spec"], "replicas": 2}}))
    kubectl("apply", *namespace_option, "-f", str(file))
    kubectl("delete", name, *namespace_option, "--wait=false")
