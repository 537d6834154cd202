"""`candidate.py URL NAMESPACE POD DURATION`: wants to lead, and prints when it does."""

from __future__ import annotations

import asyncio
import signal
import sys
import time

from kubetorch.controller.cluster.leader import Election
from kubetorch.controller.tuning import Timing
from kubetorch.k8s import kubeconfig
from kubetorch.k8s.client import Client
from kubetorch.k8s.kubeconfig import Access, Cluster, User

#: Seconds between two renewals.
PERIOD = 0.5


async def main(url: str, namespace: str, pod: str, duration: str) -> None:
    """Until it has lost, or is told to stop.

    Args:
        url: Of the API server; that of the kubeconfig when empty.
        namespace: Of the lease.
        pod: The name of this candidate.
        duration: Seconds that a lease is good for.
    """
    timing = Timing(
        lease_seconds=float(duration),
        lease_tenure_seconds=float(duration) - 1,
        lease_renewal_interval_seconds=PERIOD,
    )
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    access = Access(Cluster(url), User(), namespace=namespace, origin="test")
    async with (
        Client(access if url else kubeconfig.find(), patience=0.0) as client,
        Election(client, namespace=namespace, pod=pod, timing=timing) as election,
    ):
        waits = [asyncio.ensure_future(outcome) for outcome in (election.won(), stopped.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if election.is_leading:
            say("leads")
            waits.append(asyncio.ensure_future(election.lost()))
            await asyncio.wait(waits[1:], return_when=asyncio.FIRST_COMPLETED)
        say("stops" if stopped.is_set() else "lost")
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def say(event: str) -> None:
    sys.stdout.write(f"{event} {time.time()}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
