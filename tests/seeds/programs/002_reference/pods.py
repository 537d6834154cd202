"""The pods of the service."""

import kubetorch as kt


def my_function():
    print("called")
    return 1


compute = kt.Compute(cpus="0.1")
remote_fn = kt.fn(my_function).to(compute)
assert remote_fn() == 1

# --- the example
pods = compute.pods()
for pod in pods:
    print(pod.metadata.name, pod.status.phase)

# --- what is said of it
assert [pod.status.phase for pod in pods] == ["Running"]
assert [pod["metadata"]["name"] for pod in pods] == compute.pod_names()
remote_fn.teardown()
