"""`selector` identifies pods that belong to a compute: alone, pods that are there already."""

import kubetorch as kt

compute = kt.Compute(selector={"app": "workers", "team": "ml"})

# "Selector-only mode is when the user provides a pod selector to identify existing running pods"
assert compute.selector_only
assert compute.manifest is None
assert compute.selector == {"app": "workers", "team": "ml"}
assert not kt.Compute(cpus=1).selector_only
