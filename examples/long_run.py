"""A run that goes on without its program and after a crash; come back to it.

`python long_run.py` starts a run, and `python long_run.py ID` comes back to it.
"""

import os
import sys
import time
from pathlib import Path

import kubetorch as kt


def train(run: str, steps: int) -> dict[str, int]:
    """Stands for a training that writes a checkpoint after each step."""
    checkpoint = Path("/checkpoints", run)
    first = int(checkpoint.read_text()) if checkpoint.exists() else 0
    for step in range(first, steps):
        time.sleep(0.05)
        if step == 3 and first == 0:
            os._exit(1)  # stands for whatever may end a process
        checkpoint.write_text(str(step + 1))
        kt.progress(step + 1, steps, message=f"step {step + 1}")
    return {"steps": steps, "the last attempt began at": first}


def start() -> None:
    checkpoints = kt.Volume("checkpoints", "1Gi", mount_path="/checkpoints")
    compute = kt.Compute(cpus="0.1", volumes=[checkpoints], inactivity_ttl="1h")
    remote = kt.fn(train, name="long-run").to(compute)
    name = time.strftime("%Y%m%d-%H%M%S")
    call = remote.options(retries=2).spawn(name, steps=6)
    print("started", call.id)


def come_back(call_id: str) -> None:
    call = kt.CallHandle.from_id(call_id)
    print("result:", call.get(timeout=60))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        come_back(sys.argv[1])
    else:
        start()
