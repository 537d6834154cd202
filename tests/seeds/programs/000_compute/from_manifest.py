"""Bring your own manifest: Kubetorch deploys functions to its pods."""

import kubetorch as kt

my_manifest = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "my-workers", "labels": {"app": "my-workers"}},
    "spec": {
        "replicas": 1,
        "selector": {"matchLabels": {"app": "my-workers"}},
        "template": {
            "metadata": {"labels": {"app": "my-workers"}},
            "spec": {"containers": [{"name": "worker", "image": "python:3.11-slim"}]},
        },
    },
}
ray_manifest = {
    "apiVersion": "ray.io/v1",
    "kind": "RayCluster",
    "metadata": {"name": "my-ray", "labels": {"app": "ray"}},
    "spec": {
        "headGroupSpec": {
            "rayStartParams": {},
            "template": {
                "metadata": {"labels": {"app": "ray", "role": "head"}},
                "spec": {"containers": [{"name": "ray-head", "image": "rayproject/ray"}]},
            },
        },
    },
}


def my_func(a, b):
    return a + b


# --- the example
# Basic usage - manifest already applied via kubectl
compute = kt.Compute.from_manifest(manifest=my_manifest, selector={"app": "my-workers"})
# Deploy a function to the existing pods
remote_fn = kt.fn(my_func).to(compute)
result = remote_fn(1, 2)

# --- what is said of it
assert result == 3
assert compute.kind == "Deployment"
assert compute.selector == {"app": "my-workers"}
assert compute.manifest["spec"]["selector"] == {"matchLabels": {"app": "my-workers"}}
assert compute.pod_template["metadata"]["labels"]["app"] == "my-workers"
remote_fn.teardown()
# "If not provided, uses the manifest's spec.selector.matchLabels."
assert kt.Compute.from_manifest(my_manifest).manifest["spec"]["selector"] == {
    "matchLabels": {"app": "my-workers"}
}

# --- the example
# With custom endpoint URL (user-created service)
compute = kt.Compute.from_manifest(
    manifest=my_manifest,
    selector={"app": "my-workers"},
    endpoint=kt.Endpoint(url="my-svc.my-ns.svc.cluster.local:8080"),
)

# --- what is said of it
# "Use Endpoint(url="...") for your own Service/Ingress"
assert compute.endpoint == "my-svc.my-ns.svc.cluster.local:8080"

# --- the example
# Route to subset of pool (e.g., head node only)
compute = kt.Compute.from_manifest(
    manifest=ray_manifest,
    selector={"app": "ray"},  # Pool: all ray pods
    endpoint=kt.Endpoint(selector={"app": "ray", "role": "head"}),  # Route: head only
)

# --- what is said of it
assert compute.kind == "RayCluster"
assert compute.to_spec().endpoint.selector == {"app": "ray", "role": "head"}
assert compute.selector == {"app": "ray"}
