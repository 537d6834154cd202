"""Annotations."""

import kubetorch as kt

# --- the example
compute = kt.Compute(
    annotations={
        "prometheus.io/scrape": "true",
        "my-annotation": "my-value",
    }
)

# --- what is said of it
expected_annotations = {"prometheus.io/scrape": "true", "my-annotation": "my-value"}
assert compute.manifest["metadata"]["annotations"].items() >= expected_annotations.items()
assert compute.user_annotations == expected_annotations
