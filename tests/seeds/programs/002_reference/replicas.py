"""The number of pods: a call runs on all of them."""

import kubetorch as kt

# --- the example
compute = kt.Compute(replicas=3)


# --- what is said of it
def rank():
    import os

    return os.environ["POD_NAME"]


assert compute.manifest["spec"]["replicas"] == 3
remote_fn = kt.fn(rank).to(compute)
assert len(set(remote_fn())) == 3
remote_fn.teardown()
