"""Methods that add to a compute: labels, annotations, tolerations, variables."""

import kubetorch as kt

compute = kt.Compute(cpus=1, labels={"team": "ml"}, env_vars={"STAGE": "test"})

# "Add or update labels in the manifest metadata."
compute.add_labels({"team": "research", "project": "llm"})
assert compute.user_labels == {"team": "research", "project": "llm"}
assert compute.manifest["metadata"]["labels"].items() >= compute.user_labels.items()

# "This is useful for labels that need to be on the pod itself"
compute.add_pod_template_labels({"kueue.x-k8s.io/queue-name": "gpus"})
labels = compute.pod_template["metadata"]["labels"]
assert labels["kueue.x-k8s.io/queue-name"] == "gpus"
compute.add_pod_template_labels({}, remove_keys=["kueue.x-k8s.io/queue-name"])
assert "kueue.x-k8s.io/queue-name" not in compute.pod_template["metadata"]["labels"]

# "Add or update annotations in the manifest metadata."
compute.add_annotations({"example.com/owner": "me"})
assert compute.user_annotations == {"example.com/owner": "me"}

# "Each toleration should have keys like "key", "operator", "value", and "effect"."
spot = {"key": "spot", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}
compute.add_tolerations([spot])
assert compute.pod_spec["tolerations"] == [spot]

# "Existing env vars with the same key will be overridden."
compute.add_env_vars({"STAGE": "production", "MORE": "1"})
variables = {
    variable["name"]: variable.get("value") for variable in compute.pod_spec["containers"][0]["env"]
}
assert variables.items() >= {"STAGE": "production", "MORE": "1"}.items()
