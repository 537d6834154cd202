"""The size of /dev/shm."""

import kubetorch as kt

# --- the example
compute = kt.Compute(shared_memory_limit="2Gi")  # 2GB /dev/shm

# --- what is said of it
volumes = {volume["name"]: volume for volume in compute.pod_spec["volumes"]}
mounts = {mount["mountPath"]: mount["name"] for mount in compute.volume_mounts}
assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
# "Default: Pod's memory limit or half of node RAM.", which is what no limit means.
plain = {volume["name"]: volume for volume in kt.Compute().pod_spec["volumes"]}
assert plain["dshm"]["emptyDir"] == {"medium": "Memory"}
