"""A shell in the pod."""

import os
import sys
import tempfile
from pathlib import Path

import kubetorch as kt


def my_function():
    return 1


answer = Path("answer-of-the-shell").resolve()
compute = kt.Compute(cpus="0.1", env_vars={"STAGE": "test", "ANSWER": str(answer)})
remote_fn = kt.fn(my_function).to(compute)
with tempfile.TemporaryFile() as typed:
    typed.write(b"echo stage $STAGE service $KT_SERVICE_NAME > $ANSWER; exit\n")
    typed.seek(0)
    os.dup2(typed.fileno(), sys.stdin.fileno())

# --- the example
compute.ssh()

# --- what is said of it
assert answer.read_text() == f"stage test service {compute.service_name}\n"
remote_fn.teardown()
