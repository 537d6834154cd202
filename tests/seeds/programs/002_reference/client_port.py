"""A port of this machine that leads to the service."""

import urllib.error
import urllib.request

import kubetorch as kt


def my_function():
    print("called")
    return 1


compute = kt.Compute(cpus="0.1")
remote_fn = kt.fn(my_function).to(compute)
assert remote_fn() == 1

# --- the example
port = compute.client_port()  # e.g., 38080

# --- what is said of it
with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=20) as answer:
    assert answer.status == 200
# It lends nobody the right to call.
try:
    urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{port}/my_function", data=b"{}"), timeout=20
    )
except urllib.error.HTTPError as error:
    assert error.code == 401, error
else:
    raise AssertionError("a stranger called")
remote_fn.teardown()
