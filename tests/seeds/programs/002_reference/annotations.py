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
wanted = {"prometheus.io/scrape": "true", "my-annotation": "my-value"}
assert compute.manifest["metadata"]["annotations"].items() >= wanted.items()
assert compute.user_annotations == wanted
