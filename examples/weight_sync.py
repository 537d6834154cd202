"""A trainer hands its weights to two inference services, version after version, without a file."""

import numpy as np

import kubetorch as kt

KEY = "weight-sync-policy/newest"


def train(first, last):
    """Stands for training: after each step the next version of the weights."""
    rng = np.random.default_rng(first)
    weights = {"layers": [{"w": np.zeros((256, 256), "f4")} for _ in range(4)], "step": 0}
    for step in range(first, last + 1):
        for layer in weights["layers"]:
            layer["w"][rng.integers(256)] = step
        weights["step"] = step
        kt.put(KEY, src=weights)
    return last


class Policy:
    def __init__(self):
        self.weights = kt.get(KEY)

    def refresh(self):
        """Fill the weights in place: what changed is sent, and a version comes whole or not."""
        kt.get(KEY, dest=self.weights)
        return self.weights["step"]

    def first_layer(self):
        """Some of the tensors alone."""
        return float(kt.get(KEY, only="layers.0.*")["layers"][0]["w"].max())


def main():
    compute = kt.Compute(cpus="0.1", image=kt.Image().pip_install(["numpy"]))
    trainer = kt.fn(train).to(compute)
    print("trained until step", trainer(1, 3))
    actors = [kt.cls(Policy, name=f"policy-{letter}").to(compute) for letter in "ab"]
    print("steps of the services:", [actor.refresh() for actor in actors])
    print("trained until step", trainer(4, 5))
    print("steps of the services:", [actor.refresh() for actor in actors])
    print("largest weight of the first layer:", actors[0].first_layer())
    for service in (trainer, *actors):
        service.teardown()
    kt.rm(KEY)


if __name__ == "__main__":
    main()
