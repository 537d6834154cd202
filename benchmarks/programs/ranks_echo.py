"""What waking the processes of a distributed call takes, and nothing else.

    this program ── node ─┬─ worker       one of so many processes
                          ├─ …
                          └─ node ── …    of another pod

The processes are forks that know each other by pairs of sockets; a worker decodes the arguments,
runs `add` and encodes what it returns, all in one function.

ranks_echo
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Callable

from benchmarks.programs.answering import answer
from benchmarks.programs.kubetorch_ranks import CALLS, p50

_ARGUMENTS = json.dumps({"args": [1], "kwargs": {}}).encode()
_SIZE = 4096


def add(number: int) -> int:
    """Add one."""
    return number + 1


def work(above: socket.socket) -> None:
    """Be a worker, until there is nobody above."""
    readable = select.poll()
    readable.register(above, select.POLLIN)
    while True:
        readable.poll()
        data = above.recv(_SIZE)
        if not data:
            return
        call = json.loads(data)
        above.send(json.dumps(add(*call["args"], **call["kwargs"])).encode())


def pass_on(above: socket.socket, workers: int, nodes: int) -> None:
    """Be a pod's agent: pass each call on to all children, and answer when all have answered."""
    below = [fork(work) for _ in range(workers)]
    below += [fork(pass_on, workers, 0) for _ in range(nodes)]
    sockets = {connection.fileno(): connection for connection in (above, *below)}
    readable = select.poll()
    for descriptor in sockets:
        readable.register(descriptor, select.POLLIN)
    missing_answers = 0
    while True:
        for descriptor, _ in readable.poll():
            data = sockets[descriptor].recv(_SIZE)
            if descriptor == above.fileno():
                if not data:
                    return
                missing_answers = len(below)
                for child in below:
                    child.send(data)
                continue
            missing_answers -= 1
            if not missing_answers:
                above.send(data)


def fork(run: Callable[..., None], *arguments: int) -> socket.socket:
    """Start a process, which ends with the last of its parent's socket."""
    parent_end, child_end = socket.socketpair()
    if os.fork() == 0:
        parent_end.close()
        run(child_end, *arguments)
        os._exit(0)
    child_end.close()
    return parent_end


def main() -> None:
    """Start the processes, then answer."""
    few, many = fork(pass_on, 4, 1), fork(pass_on, 8, 7)

    def call(root: socket.socket) -> None:
        root.send(_ARGUMENTS)
        root.recv(_SIZE)

    answer(
        {
            "ranks": lambda: {
                "8": p50(lambda: call(few)),
                "64": p50(lambda: call(many), CALLS // 4),
            }
        }
    )


if __name__ == "__main__":
    main()
