"""Volumes: a new one, an existing claim, the name of one."""

import kubetorch as kt

for existing in ("existing-pvc", "pvc-name"):
    kt.Volume(name=existing, size="1Gi", mount_path=f"/mnt/{existing}").create()

# --- the example
compute = kt.Compute(
    volumes=[
        kt.Volume(name="data", size="10Gi", mount_path="/data"),
        kt.Volume.from_name("existing-pvc", mount_path="/mnt/data"),
        "pvc-name",  # String reference to existing PVC
    ]
)

# --- what is said of it
volumes = {
    volume["name"]: volume.get("persistentVolumeClaim") for volume in compute.pod_spec["volumes"]
}
mounts = {mount["mountPath"]: mount["name"] for mount in compute.volume_mounts}
assert volumes[mounts["/data"]] == {"claimName": "data"}
assert volumes[mounts["/mnt/data"]] == {"claimName": "existing-pvc"}
assert {"claimName": "pvc-name"} in volumes.values()
for existing in ("existing-pvc", "pvc-name"):
    kt.Volume.from_name(existing).delete()
