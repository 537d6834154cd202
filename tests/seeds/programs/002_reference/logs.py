"""Logs of the service, as they come."""

import contextlib
import io
import threading

import kubetorch as kt


def my_function():
    print("called")
    return 1


class Shown(io.StringIO):
    """What is shown; the service ends as soon as it has the line that the function printed."""

    def write(self, text: str) -> int:
        if "called" in text:
            ending.start()
        return super().write(text)


compute = kt.Compute(cpus="0.1")
remote_fn = kt.fn(my_function).to(compute)
assert remote_fn() == 1
ending = threading.Thread(target=remote_fn.teardown)

with contextlib.redirect_stdout(Shown()) as shown:
    # --- the example
    compute.logs(follow=True, tail=100)
    # --- what is said of it

assert "called" in shown.getvalue()
ending.join()
