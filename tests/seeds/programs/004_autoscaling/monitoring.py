"""The commands that show a service, and labels that kubectl finds its pods by."""

import subprocess

import kubetorch as kt


def inference(inputs):
    return inputs


remote_fn = kt.fn(inference, name="my-service").to(kt.Compute(cpus="0.1").autoscale(min_scale=1))

queries = """
# --- the example
# View service status
kt status my-service
# View pod count
kubectl get pods -l serving.knative.dev/service=my-service
# View autoscaler decisions
kubectl describe ksvc my-service
# --- what is said of it
"""
commands = [line.split() for line in queries.splitlines() if line.startswith("k")]
status, *of_cluster = commands
completed = subprocess.run([*status, "--json"], capture_output=True, text=True, timeout=30)
assert completed.returncode == 0, completed.stderr
assert "my-service" in completed.stdout
# The others need a cluster with Knative; the object has the name that they look for.
assert remote_fn.compute.kind == "Service"
assert all("my-service" in command[-1] for command in of_cluster)
assert remote_fn.compute.manifest["metadata"]["name"] == "my-service"
remote_fn.teardown()
