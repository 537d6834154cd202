"""A script that runs for a while as an app: its lines, then its exit code.

`kt run python app_script.py 3` does the same from a shell: there, kt.app says what it runs on.
"""

import os
import sys
import time
from pathlib import Path

import kubetorch as kt

kt.app(cpus="0.1")


def work(steps: int) -> None:
    for step in range(1, steps + 1):
        print("step", step, "of", steps)
        time.sleep(0.2)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(int(sys.argv[1]))
    else:
        os.chdir(Path(__file__).parent)  # an app runs in the folder in which its program does
        job = kt.app("python app_script.py 3", name="work")
        job.to(kt.Compute(cpus="0.1"), stream_logs=False)
        print("exit code:", job.follow(print))
        job.teardown()
