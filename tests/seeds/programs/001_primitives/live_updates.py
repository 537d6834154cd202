"""A package more: the pod goes on running, and only the new step runs."""

import kubetorch as kt


def my_fn():
    import importlib.util
    import os

    names = ("transformers", "datasets")
    return [os.environ["POD_NAME"], *(importlib.util.find_spec(name) is not None for name in names)]


# --- the example
# Initial deployment
image = kt.Image("pytorch/pytorch:2.0.0").pip_install(["transformers"])
remote_fn = kt.fn(my_fn).to(kt.Compute(image=image))

# --- what is said of it
pod, *installed = remote_fn()
assert installed == [True, False]

# --- the example
# Later, add a package - only this step runs on redeploy
image = image.pip_install(["datasets"])
remote_fn = kt.fn(my_fn).to(kt.Compute(image=image))  # Fast update

# --- what is said of it
later_pod, *installed = remote_fn()
assert installed == [True, True]
assert later_pod == pod
assert len(remote_fn.compute.pods()) == 1
remote_fn.teardown()
