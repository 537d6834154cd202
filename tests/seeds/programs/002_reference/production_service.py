"""Production: frozen, stopped when idle, of a registry of its own."""

import kubetorch as kt

# --- the example
compute = kt.Compute(
    cpus="2",
    memory="8Gi",
    freeze=True,
    inactivity_ttl="1h",
    labels={"env": "production"},
    image=kt.Image().from_docker("my-registry/my-image:v1.0"),
)

# --- what is said of it
manifest = compute.manifest
assert (
    manifest["metadata"]["annotations"].items()
    >= {
        "kubetorch.com/freeze": "true",
        "kubetorch.com/inactivity-ttl": "1h",
    }.items()
)
assert manifest["metadata"]["labels"]["env"] == "production"
assert compute.pod_spec["containers"][0]["image"] == "my-registry/my-image:v1.0"
