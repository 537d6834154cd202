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
    found = {key_of(name=name): fields for name, fields in containers.items()}
    return {"f:template": {"f:spec": {"f:containers": found}}}


VARIABLE = {"name": "KEY", "value": SECRET}
THERE = deployment(
    {"name": "main", "image": "a", "command": ["sleep"], "env": [VARIABLE]}, {"name": "side"}
)
THERE["metadata"]["annotations"] = {labels.LAST_APPLIED: SECRET, "own": "1"}
THERE["metadata"]["managedFields"] = [
    entry("kubectl", {"f:replicas": {}, **pods(main={".": {}, "f:image": {}}, side={".": {}})})
]
WANTED = deployment({"name": "kubetorch", "image": "a", "env": [VARIABLE]}, {"name": "side"})
PATHS = [*takeover.replaced_fields(THERE, WANTED, {"main"})]


def taken(others: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The object after its deploy, and what others have changed since."""
    found = copy.deepcopy(WANTED)
    found["spec"] |= changes
    found["metadata"]["annotations"] = {labels.BEFORE: takeover.record(THERE, WANTED, PATHS)}
    own = {"f:replicas": {}, **pods(kubetorch={".": {}, "f:image": {}}, side={".": {}})}
    if "f:replicas" in (others or {}):
        del own["f:replicas"]
    found["metadata"]["managedFields"] = [
        entry("kubetorch", own, "Apply"),
        *([entry("scaler", others)] if others else []),
    ]
    return found


def restored(one: dict[str, Any]) -> dict[str, Any]:
    before = takeover.read(one)
    assert before is not None
    return takeover.restoring_manifest(one, before, "kubetorch")


def test_the_container_that_becomes_the_agent_s_is_replaced_and_others_stay() -> None:
    assert PATHS == [["f:spec", "f:template", "f:spec", "f:containers", MAIN]]
    [of_kubectl, of_kubetorch] = takeover.entries_with_claim(THERE, "kubetorch", PATHS)
    assert of_kubectl["fieldsV1"]["f:spec"] == {"f:replicas": {}, **pods(side={".": {}})}
    assert of_kubetorch["operation"] == "Apply"
    assert of_kubetorch["fieldsV1"]["f:spec"] == pods(main={".": {}, "f:image": {}})


def test_arguments_of_a_container_that_keeps_its_name_are_not_the_agent_s() -> None:
    there = deployment({"name": "kubetorch", "args": ["--train"]})
    [path] = takeover.replaced_fields(there, WANTED, {"kubetorch"})
    assert path[-2:] == [AGENTS, "f:args"]


def test_values_that_go_on_are_not_recorded() -> None:
    one = taken()
    text = one["metadata"]["annotations"][labels.BEFORE]
    assert SECRET not in text
    [main, _] = restored(one)["spec"]["template"]["spec"]["containers"]
    assert main == THERE["spec"]["template"]["spec"]["containers"][0]


def test_what_a_deploy_changed_is_put_back_and_what_others_changed_stays() -> None:
    assert restored(taken(replicas=4))["spec"]["replicas"] == 1
    assert "replicas" not in restored(taken({"f:replicas": {}}, replicas=4))["spec"]


def test_an_image_that_somebody_has_set_since_is_that_of_the_user_s_container() -> None:
    one = taken(pods(kubetorch={"f:image": {}}))
    one["spec"]["template"]["spec"]["containers"][0]["image"] = "newer"
    [main, _] = restored(one)["spec"]["template"]["spec"]["containers"]
    assert (main["name"], main["image"], main["command"]) == ("main", "newer", ["sleep"])


def test_pods_without_an_account_have_none_again() -> None:
    one = taken()
    one["spec"]["template"]["spec"]["serviceAccountName"] = "kubetorch-service-account"
    found = restored(one)["spec"]["template"]["spec"]
    assert (found["serviceAccountName"], found["serviceAccount"]) == ("", "")


def test_fields_are_again_of_those_who_had_them() -> None:
    one = taken()
    before = takeover.read(one)
    assert before is not None
    own = {"f:replicas": {}, **pods(main={".": {}, "f:image": {}, "f:new": {}})}
    one["metadata"]["managedFields"] = [entry("kubetorch", own, "Apply"), entry("else", {})]
    [other, of_kubectl] = takeover.entries_given_back(one, before, "kubetorch")
    assert other["manager"] == "else"
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
    found = takeover.original_manifest(job, before)
    assert "selector" not in found["spec"]
    assert found["spec"]["template"]["metadata"]["labels"] == {"own": "1"}
    assert (found["kind"], found["metadata"]["name"]) == ("Job", "train")


def test_a_record_that_somebody_has_edited_counts_as_none() -> None:
    one = taken()
    one["metadata"]["annotations"][labels.BEFORE] = "{"
    assert takeover.is_recorded(one)
    assert takeover.read(one) is None
