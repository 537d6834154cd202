"""Whether the service runs."""

import kubetorch as kt


def my_function():
    print("called")
    return 1


compute = kt.Compute(cpus="0.1")
remote_fn = kt.fn(my_function).to(compute)
assert remote_fn() == 1
ready = False

# --- the example
if compute.is_up():
    print("Service is ready")
    # --- what is said of it
    ready = True

assert ready
remote_fn.teardown()
assert not compute.is_up()
