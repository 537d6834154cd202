"""A data store of its own as a process in a cluster (`kubetorch.controller.store_server`)."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.cluster import process
from kubetorch.controller.cluster.leader import PODS_OF_STORE, STORE, Election
from kubetorch.controller.cluster.process import (
    LeadingProcess,
    installation_secret,
    read_settings,
)
from kubetorch.controller.store_server import StoreServer
from kubetorch.datastore.blobs import Room
from kubetorch.errors import KubetorchError
from kubetorch.lib.clock import SystemClock

if TYPE_CHECKING:
    from kubetorch.datastore.bucket_store import StoreBucket

#: The name of the blob store, and the hint when it is full.
ROOM = Room(
    "the data store",
    "delete keys that nobody needs, kt rm, or have an administrator give it more: kt upgrade --set "
    "store.separate.emptyDir.sizeLimit=400Gi, or a larger volume (store.separate.persistence), and "
    "each namespace more of it (store.separate.namespaceQuota)",
)


class StoreProcess(LeadingProcess):
    name = STORE
    pods = PODS_OF_STORE

    async def _serve(
        self, election: Election, bucket: StoreBucket | None, stack: contextlib.AsyncExitStack
    ) -> None:
        settings = self._settings
        server = StoreServer(
            blob_stores=BlobStores(
                settings.blobs / "blobs", room=settings.room(ROOM), bucket=bucket
            ),
            keys=settings.blobs / "keys",
            clock=SystemClock(),
            secret=await installation_secret(self._client, settings.namespace),
            environ=settings.environ,
        )
        stack.push_async_callback(server.close)
        await server.start(self._listener)


def main(environ: Mapping[str, str]) -> int:
    try:
        settings = read_settings(environ)
        return process.run(partial(StoreProcess, settings), settings)
    except (KubetorchError, OSError) as error:
        sys.stderr.write(f"the data store cannot start: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(os.environ))
