"""The all-reduce of `kubetorch_ranks`, by `torchrun`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.programs.answering import answer
from benchmarks.programs.kubetorch_ranks import REDUCE

#: One write for a line: both processes have the same pipe.
END = """
import os
os.write(1, f"seconds {reduce()}\\n".encode())
dist.destroy_process_group()
"""


def reduce() -> dict[str, float]:
    """Start two processes, and have them reduce."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "reduce.py"
        program.write_text(f"{REDUCE}{END}")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*command, "--nproc-per-node=2", str(program)],
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=True,
        )
    return {
        "reduce": max(float(line.split()[1]) for line in done.stdout.splitlines() if "sec" in line)
    }


if __name__ == "__main__":
    answer({"torch": reduce})
