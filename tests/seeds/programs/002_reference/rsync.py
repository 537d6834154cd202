"""Files of this machine in the pods."""

from pathlib import Path

import kubetorch as kt


def my_function():
    return 1


compute = kt.Compute(cpus="0.1")
remote_fn = kt.fn(my_function).to(compute)
for folder in ("src", "data"):
    Path(folder).mkdir()
    Path(folder, "note.txt").write_text(f"{folder}\n")

# --- the example
compute.rsync(["./src", "./data"])

# --- what is said of it
outputs = compute.run_bash("cat src/note.txt data/note.txt")
assert outputs == [[0, "src\ndata\n", ""]], outputs
remote_fn.teardown()
