"""Getting blobs back from pods.

A controller whose blobs lie on an emptyDir starts without them, while the pods go on with what they
have. What a new pod of the same generation will ask for is asked of one that runs already, as soon
as it connects.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kubetorch.controller.depots import Depots
from kubetorch.controller.workload import Workload
from kubetorch.errors import KubetorchError
from kubetorch.lib.clock import Clock
from kubetorch.wire.messages import SendBlobs

#: Seconds that one pod has to send what it has, until another one is asked.
PATIENCE = 30.0

_log = logging.getLogger(__name__)


class Recovery:
    """Asks pods for what is missing.

    Args:
        depots: Where it is missing.
        clock: Says when a pod was asked.
    """

    def __init__(self, depots: Depots, clock: Clock) -> None:
        self._depots = depots
        self._clock = clock
        # When a pod of each workload was asked last; only workloads that lack something are here.
        self._asked: dict[tuple[str, str], float] = {}

    def ask(self, workload: Workload, send: Callable[[SendBlobs], None]) -> None:
        """Ask a pod that serves, if something is missing and no other pod was asked just now.

        Args:
            workload: The pod's.
            send: Tells the pod.
        """
        now = self._clock.time()
        if now - self._asked.get(workload.key, -PATIENCE) < PATIENCE:
            return
        try:
            message = self._missing(workload)
        except (KubetorchError, OSError) as error:
            _log.warning("blobs not looked for workload=%s error=%s", workload.key, error)
            return
        if message is None:
            self._asked.pop(workload.key, None)
            return
        self._asked[workload.key] = now
        _log.info(
            "blobs missing workload=%s count=%s", workload.key, len(message.blobs + message.trees)
        )
        send(message)

    def _missing(self, workload: Workload) -> SendBlobs | None:
        blobs: dict[str, None] = {}
        trees: dict[str, None] = {}
        for spec in workload.specs:
            missing = self._depots.of(spec.namespace).completeness.missing(spec)
            found = dict.fromkeys(missing)
            trees |= {digest: None for digest in found if digest in spec.trees}
            blobs |= found
        lost = tuple(digest for digest in blobs if digest not in trees)
        return SendBlobs(blobs=lost, trees=tuple(trees)) if blobs else None
