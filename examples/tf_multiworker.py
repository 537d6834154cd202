"""TensorFlow's MultiWorkerMirroredStrategy: two workers train one model, each on its share."""

import kubetorch as kt


def train(steps: int) -> tuple[int, bool]:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # the workers are in TF_CONFIG
    with strategy.scope():
        weight = tf.Variable(0.0)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = (weight * x - y) ** 2
        gradient = tape.gradient(loss, weight)
        total = tf.distribute.get_replica_context().all_reduce("mean", gradient)
        weight.assign_sub(0.1 * total)
        return loss

    for _ in range(steps):
        strategy.run(step, args=(tf.constant(1.0), tf.constant(3.0)))
    return strategy.num_replicas_in_sync, abs(float(weight.numpy()) - 3.0) < 0.01


if __name__ == "__main__":
    image = kt.Image().pip_install("tensorflow-cpu").set_env_vars({"TF_CPP_MIN_LOG_LEVEL": "3"})
    compute = kt.Compute(cpus="0.1", memory="1Gi", image=image, inactivity_ttl="30m")
    service = kt.fn(train, name="tf-training").to(compute.distribute("tensorflow", workers=2))
    print("workers and whether the weight is right:", service(50))
    service.teardown()
