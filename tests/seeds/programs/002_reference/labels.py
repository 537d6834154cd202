"""Labels of the service and its pods."""

import kubetorch as kt

# --- the example
compute = kt.Compute(
    labels={
        "user": "alice",
        "team": "ml-research",
        "project": "llm-training",
    }
)

# --- what is said of it
expected_labels = {"user": "alice", "team": "ml-research", "project": "llm-training"}
assert compute.manifest["metadata"]["labels"].items() >= expected_labels.items()
# "Query with kubectl": it asks for pods, so they have the labels too.
queries = """
# --- the example
kubectl get pods -l user=alice
kubectl get pods -l team=ml-research
# --- what is said of it
"""
pod_labels = compute.pod_template["metadata"]["labels"]
selectors = [line.split(" -l ")[1].split("=") for line in queries.splitlines() if " -l " in line]
assert len(selectors) == 2
assert all(pod_labels[key] == text for key, text in selectors)
assert compute.user_labels == expected_labels
