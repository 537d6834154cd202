"""Every parameter of the constructor, by its name and with its default."""

import inspect

import kubetorch as kt

# --- the example
NAMES = """
    cpus memory disk_size gpus gpu_type gpu_memory shared_memory_limit
    namespace labels annotations node_selector tolerations service_account_name service_template
    image env_vars secrets volumes working_dir
    queue priority_class_name
    replicas freeze inactivity_ttl launch_timeout image_pull_policy gpu_anti_affinity
    logging_config
    kubeconfig_path allowed_serialization
"""
# --- what is said of it
parameters = inspect.signature(kt.Compute).parameters
assert set(NAMES.split()) <= set(parameters)
for name in NAMES.split():
    assert parameters[name].default in (None, False), name
compute = kt.Compute()
# "replicas: int = 1, freeze: bool = False"
assert (compute.replicas, compute.freeze) == (1, False)
