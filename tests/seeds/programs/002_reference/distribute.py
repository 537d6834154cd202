"""Distribution, in the spelling of this document."""

import kubetorch as kt

compute = kt.Compute(cpus=1)
left_out = {"num_proc": 2}

# --- the example
compute.distribute(
    framework="pytorch",  # "pytorch" | "ray"
    workers=4,
    distribution_args={**left_out},
)

# --- what is said of it
assert compute.distributed_config["distribution_type"] == "pytorch"
assert compute.distributed_config["workers"] == 4
assert compute.distributed_config["num_proc"] == 2
assert compute.manifest["spec"]["replicas"] == 4
