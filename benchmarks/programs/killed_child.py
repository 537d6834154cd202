"""From `kill -9` of a child process to the return of the `waitpid` of its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from benchmarks.programs.answering import answer


def faults() -> dict[str, float]:
    """One child, killed while its parent waits for it."""
    command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        ended: list[float] = []

        def wait() -> None:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            ended.append(time.monotonic())

        waiter = threading.Thread(target=wait)
        waiter.start()
        began = time.monotonic()
        os.kill(child.pid, signal.SIGKILL)
        waiter.join()
    return {"worker": ended[0] - began, "agent": ended[0] - began}


if __name__ == "__main__":
    answer({"faults": faults})
