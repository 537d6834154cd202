"""A memory limit, which only `service_template` or a manifest sets, and what exceeding it means.

`memory=` of a Compute is a request: it says what a pod needs, and limits nothing.
"""

import kubetorch as kt

LIMIT = {"containers": [{"name": "kubetorch", "resources": {"limits": {"memory": "300Mi"}}}]}


def fill(mebibytes: int) -> int:
    data = b"x" * (mebibytes * 1024 * 1024)
    return len(data)


if __name__ == "__main__":
    compute = kt.Compute(cpus="0.1", service_template={"spec": {"template": {"spec": LIMIT}}})
    remote = kt.fn(fill).to(compute)

    print("within the limit:", remote(10))
    try:
        remote(1000)
    except kt.OutOfMemoryError as error:
        print("too much:", error.limit_bytes, error.used_bytes > 0.9 * error.limit_bytes)
    print("a new worker serves:", remote(10))
    remote.teardown()
