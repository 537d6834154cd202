"""Edit a function and deploy it again, twenty times: how long until the new code answers?

`python edit_loop.py torch` does so with a module that imports torch.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import kubetorch as kt

EDITS = 20


def source(number, imports):
    lines = [f"import {name}" for name in imports]
    return "\n".join([*lines, "def answer():", f"    return {number}", ""])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "edited.py")
        file.write_text(source(0, sys.argv[1:]))
        sys.path.insert(0, folder)
        import edited

        remote = kt.fn(edited.answer, sync_dir=folder).to(kt.Compute(cpus="0.1"))
        seconds = []
        try:
            for number in range(1, EDITS + 1):
                file.write_text(source(number, sys.argv[1:]))
                begun = time.perf_counter()
                remote.to(remote.compute)
                assert remote() == number
                seconds.append(time.perf_counter() - begun)
        finally:
            remote.teardown()
        print(f"{EDITS} edits, p50 from an edit to its result: {statistics.median(seconds):.3f} s")
