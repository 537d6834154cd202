"""`kt server start`: the agent in a pod that Kubetorch did not make.

The runtime has this command alone as `/kubetorch/bin/kt`, without the rest of the command line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kubetorch.config import environment
from kubetorch.errors import KubetorchError
from kubetorch.pod import agent
from kubetorch.pod.identity import HOST, PORT, Options, environ_of


def start(options: Options) -> int:
    return agent.main(environ_of(options, environment.for_programs()))


def main(arguments: Sequence[str]) -> int:
    """Run `kt server start` without the rest of the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="kt server start", add_help=False)
    parser.add_argument("server", choices=["server"])
    parser.add_argument("start", choices=["start"])
    parser.add_argument("-p", "--port", type=int, default=PORT)
    parser.add_argument("-h", "--host", default=HOST)
    parser.add_argument("-n", "--workload")
    parser.add_argument("-u", "--controller-url")
    parser.add_argument("--help", action="help")
    options = parser.parse_args(arguments)
    try:
        return start(Options(options.workload, options.controller_url, options.host, options.port))
    except KubetorchError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
