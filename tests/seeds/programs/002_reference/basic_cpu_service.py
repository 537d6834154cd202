"""A basic service, running."""

import kubetorch as kt

# --- the example
compute = kt.Compute(cpus="0.5", memory="1Gi")


# --- what is said of it
def double(value):
    return 2 * value


assert compute.resources == {"requests": {"cpu": "0.5", "memory": "1Gi"}}
remote_fn = kt.fn(double).to(compute)
assert remote_fn(21) == 42
remote_fn.teardown()
