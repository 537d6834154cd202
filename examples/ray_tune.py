"""Ray on two pods: the function runs on the head, its tasks on both.

On a cluster with KubeRay, RAY_IMAGE names an image that has Ray, such as rayproject/ray:2.53.0.
"""

import os

import kubetorch as kt


def best(candidates: list[float]) -> tuple[float, int]:
    import ray

    ray.init(address="auto", log_to_driver=False)

    @ray.remote(num_cpus=0.1, scheduling_strategy="SPREAD")
    def loss(rate: float) -> tuple[float, float, str]:
        return (rate - 0.3) ** 2, rate, ray.get_runtime_context().get_node_id()

    losses = ray.get([loss.remote(rate) for rate in candidates])
    nodes = len([node for node in ray.nodes() if node["Alive"]])
    ray.shutdown()
    return min(losses)[1], nodes


if __name__ == "__main__":
    image = kt.Image(image_id=os.environ.get("RAY_IMAGE")).pip_install("ray")
    compute = kt.Compute(cpus="0.1", memory="1Gi", image=image, inactivity_ttl="30m")
    service = kt.fn(best).to(compute.distribute("ray", workers=2))
    print("best rate and nodes:", service([0.1, 0.2, 0.3, 0.4]))
    service.teardown()
