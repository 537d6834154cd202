"""JAX on several processes: a sum over the devices of all of them."""

import kubetorch as kt


def total() -> tuple[int, float]:
    import jax

    if not jax.distributed.is_initialized():
        jax.distributed.initialize()
    mine = jax.numpy.ones(jax.local_device_count()) * (jax.process_index() + 1)
    summed = jax.pmap(lambda x: jax.lax.psum(x, "all"), axis_name="all")(mine)
    return jax.process_count(), float(summed[0])


if __name__ == "__main__":
    image = kt.Image().pip_install("jax").set_env_vars({"JAX_PLATFORMS": "cpu"})
    compute = kt.Compute(cpus="0.1", memory="512Mi", image=image, inactivity_ttl="30m")
    service = kt.fn(total).to(compute.distribute("jax", workers=2))
    print("processes and sum:", service())
    service.teardown()
