"""What a user's object was before a deploy took it over, and what a teardown applies."""

from __future__ import annotations

import copy
from typing import Any

from kubetorch.controller.backends.kubernetes import takeover
from kubetorch.k8s.managed_fields import key_of
from kubetorch.manifests import labels

MAIN, AGENTS, SIDE = (key_of(name=name) for name in ("main", "kubetorch", "side"))
SECRET = "a-value-that-stays"


def deployment(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "train", "namespace": "team", "annotations": {}, "labels": {"a": "b"}},
        "spec": {"replicas": 1, **spec, "template": {"spec": {"containers": list(containers)}}},
    }


def entry(manager: str, spec: dict[str, Any], operation: str = "Update") -> dict[str, Any]:
    return {
        "manager": manager,
        "operation": operation,
        "apiVersion": "apps/v1",
        "fieldsType": "FieldsV1",
        "fieldsV1": {"f:spec": spec},
    }


def pods(**containers: dict[str, Any]) -> dict[str, Any]:
    container_fields = {key_of(name=name): fields for name, fields in containers.items()}
    return {"f:template": {"f:spec": {"f:containers": container_fields}}}


VARIABLE = {"name": "KEY", "value": SECRET}
LIVE_DEPLOYMENT = deployment(
    {"name": "main", "image": "a", "command": ["sleep"], "env": [VARIABLE]}, {"name": "side"}
)
LIVE_DEPLOYMENT["metadata"]["annotations"] = {labels.LAST_APPLIED: SECRET, "own": "1"}
LIVE_DEPLOYMENT["metadata"]["managedFields"] = [
    entry("kubectl", {"f:replicas": {}, **pods(main={".": {}, "f:image": {}}, side={".": {}})})
]
DESIRED_DEPLOYMENT = deployment(
    {"name": "kubetorch", "image": "a", "env": [VARIABLE]}, {"name": "side"}
)
PATHS = [*takeover.replaced_fields(LIVE_DEPLOYMENT, DESIRED_DEPLOYMENT, {"main"})]


def taken(foreign_fields: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The object after its deploy, and what others have changed since."""
    live_object = copy.deepcopy(DESIRED_DEPLOYMENT)
    live_object["spec"] |= changes
    live_object["metadata"]["annotations"] = {
        labels.BEFORE: takeover.record(LIVE_DEPLOYMENT, DESIRED_DEPLOYMENT, PATHS)
    }
    own_fields = {"f:replicas": {}, **pods(kubetorch={".": {}, "f:image": {}}, side={".": {}})}
    if "f:replicas" in (foreign_fields or {}):
        del own_fields["f:replicas"]
    live_object["metadata"]["managedFields"] = [
        entry("kubetorch", own_fields, "Apply"),
        *([entry("scaler", foreign_fields)] if foreign_fields else []),
    ]
    return live_object


def restored(live_object: dict[str, Any]) -> dict[str, Any]:
    before = takeover.read(live_object)
    assert before is not None
    return takeover.restoring_manifest(live_object, before, "kubetorch")


def test_the_container_that_becomes_the_agent_s_is_replaced_and_others_stay() -> None:
    assert PATHS == [["f:spec", "f:template", "f:spec", "f:containers", MAIN]]
    [of_kubectl, of_kubetorch] = takeover.entries_with_claim(LIVE_DEPLOYMENT, "kubetorch", PATHS)
    assert of_kubectl["fieldsV1"]["f:spec"] == {"f:replicas": {}, **pods(side={".": {}})}
    assert of_kubetorch["operation"] == "Apply"
    assert of_kubetorch["fieldsV1"]["f:spec"] == pods(main={".": {}, "f:image": {}})


def test_arguments_of_a_container_that_keeps_its_name_are_not_the_agent_s() -> None:
    live_deployment = deployment({"name": "kubetorch", "args": ["--train"]})
    [path] = takeover.replaced_fields(live_deployment, DESIRED_DEPLOYMENT, {"kubetorch"})
    assert path[-2:] == [AGENTS, "f:args"]


def test_values_that_go_on_are_not_recorded() -> None:
    live_object = taken()
    text = live_object["metadata"]["annotations"][labels.BEFORE]
    assert SECRET not in text
    [main, _] = restored(live_object)["spec"]["template"]["spec"]["containers"]
    assert main == LIVE_DEPLOYMENT["spec"]["template"]["spec"]["containers"][0]


def test_what_a_deploy_changed_is_put_back_and_what_others_changed_stays() -> None:
    assert restored(taken(replicas=4))["spec"]["replicas"] == 1
    assert "replicas" not in restored(taken({"f:replicas": {}}, replicas=4))["spec"]


def test_an_image_that_somebody_has_set_since_is_that_of_the_user_s_container() -> None:
    live_object = taken(pods(kubetorch={"f:image": {}}))
    live_object["spec"]["template"]["spec"]["containers"][0]["image"] = "newer"
    [main, _] = restored(live_object)["spec"]["template"]["spec"]["containers"]
    assert (main["name"], main["image"], main["command"]) == ("main", "newer", ["sleep"])


def test_pods_without_an_account_have_none_again() -> None:
    live_object = taken()
    live_object["spec"]["template"]["spec"]["serviceAccountName"] = "kubetorch-service-account"
    pod_spec = restored(live_object)["spec"]["template"]["spec"]
    assert (pod_spec["serviceAccountName"], pod_spec["serviceAccount"]) == ("", "")


def test_fields_are_again_of_those_who_had_them() -> None:
    live_object = taken()
    before = takeover.read(live_object)
    assert before is not None
    own_fields = {"f:replicas": {}, **pods(main={".": {}, "f:image": {}, "f:new": {}})}
    live_object["metadata"]["managedFields"] = [
        entry("kubetorch", own_fields, "Apply"),
        entry("else", {}),
    ]
    [foreign_entry, of_kubectl] = takeover.entries_given_back(live_object, before, "kubetorch")
    assert foreign_entry["manager"] == "else"
    assert of_kubectl["manager"] == "kubectl"
    assert of_kubectl["fieldsV1"]["f:spec"] == {
        "f:replicas": {},
        **pods(main={".": {}, "f:image": {}}),
    }


def test_a_job_is_made_anew_without_what_its_controller_added() -> None:
    job = deployment({"name": "main"}, selector={"matchLabels": {"x": "1"}})
    job |= {"apiVersion": "batch/v1", "kind": "Job"}
    generated = {"batch.kubernetes.io/controller-uid": "1", "job-name": "train"}
    job["spec"]["template"]["metadata"] = {"labels": {**generated, "own": "1"}}
    job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    job["metadata"]["annotations"] = {labels.BEFORE: takeover.record(job, job, [])}
    before = takeover.read(job)
    assert before is not None
    assert before.is_ended
    original_job = takeover.original_manifest(job, before)
    assert "selector" not in original_job["spec"]
    assert original_job["spec"]["template"]["metadata"]["labels"] == {"own": "1"}
    assert (original_job["kind"], original_job["metadata"]["name"]) == ("Job", "train")


def test_a_record_that_somebody_has_edited_counts_as_none() -> None:
    live_object = taken()
    live_object["metadata"]["annotations"][labels.BEFORE] = "{"
    assert takeover.is_recorded(live_object)
    assert takeover.read(live_object) is None
