"""Environment variables; other variables in a value are expanded in the pod."""

import kubetorch as kt

# --- the example
compute = kt.Compute(
    env_vars={
        "OMP_NUM_THREADS": "4",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "MY_API_KEY": "secret-value",
        "PATH": "$PATH:/custom/bin",  # Variable expansion supported
    }
)


# --- what is said of it
def environment():
    import os

    return {name: os.environ[name] for name in ("OMP_NUM_THREADS", "MY_API_KEY", "PATH")}


remote_fn = kt.fn(environment).to(compute)
pod_environ = remote_fn()
assert (pod_environ["OMP_NUM_THREADS"], pod_environ["MY_API_KEY"]) == ("4", "secret-value")
first, _, last = pod_environ["PATH"].rpartition(":")
assert first and "$" not in first
assert last == "/custom/bin"
remote_fn.teardown()
assert compute.env_vars["CUDA_VISIBLE_DEVICES"] == "0,1"
