"""Removes the objects that the controller has made; helm runs this before it uninstalls.

The image that it runs in has no command line of ours, so this is a program of its own.

    python -m kubetorch.install --namespace kubetorch [--watched NAMESPACE]...
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from kubetorch.errors import KubetorchError
from kubetorch.install import remove
from kubetorch.install.remove import Removal
from kubetorch.install.tuning import TIMING
from kubetorch.k8s import kubeconfig
from kubetorch.k8s.client import Client


def main(arguments: Sequence[str]) -> int:
    """Remove the objects; return the exit status."""
    parser = argparse.ArgumentParser(prog="kubetorch.install", description=__doc__)
    parser.add_argument("--namespace", required=True, help="where Kubetorch is installed")
    parser.add_argument("--watched", action="append", default=[], help="one of watchNamespaces")
    options = parser.parse_args(arguments)
    try:
        asyncio.run(_remove(options.namespace, options.watched))
    except KubetorchError as error:
        _say(str(error))
        return 1
    return 0


async def _remove(namespace: str, watched: list[str]) -> None:
    async with Client(kubeconfig.find()) as client:
        scope = await remove.scope_of(client, watched, namespace)
        removal = Removal(namespace, scope, TIMING.removal_seconds, contents_only=True)
        done = await remove.remove(client, removal, (), _say)
    for user_object in (*done.user_objects.volumes, *done.user_objects.secrets):
        _say(f"left {user_object}, which a user made")
    for definition_user in done.definition_users:
        _say(f"left the kind KubetorchWorkload for {definition_user}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
