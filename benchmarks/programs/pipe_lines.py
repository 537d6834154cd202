"""How long a line takes from `print` in a child process through a pipe to its reader.

pipe_lines FOLDER_OF_SERVICE
"""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.programs import driving
from benchmarks.programs.answering import answer, arguments


def main() -> None:
    """Answer."""
    [project] = arguments()

    def lines(count: int, interval: float) -> dict[str, float]:
        code = f"import service; service.tick({count}, {interval})"
        samples = []
        with subprocess.Popen(
            [sys.executable, "-u", "-c", code], cwd=project, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                came = time.monotonic()
                samples.append(came - float(line.split()[-1]))
        return driving.percentiles(samples)

    answer({"lines": lines})


if __name__ == "__main__":
    main()
