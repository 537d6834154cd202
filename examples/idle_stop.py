"""A service that nobody calls for `inactivity_ttl` stops by itself; a running call counts."""

import time

import kubetorch as kt


def slow(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


if __name__ == "__main__":
    remote = kt.fn(slow).to(kt.Compute(cpus="0.1", inactivity_ttl="5s"))
    begun = time.monotonic()
    print("a call of 7 s:", remote(7))

    time.sleep(2)
    print("2 s later:", kt.fn(name="slow").service_name, "is there")

    while True:
        time.sleep(0.5)
        try:
            kt.fn(name="slow")
        except kt.ServiceNotFoundError:
            break
    print("stopped after 5 s without a call:", time.monotonic() - begun > 12)
