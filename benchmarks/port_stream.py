"""A connection to a port of a pod through the API server, with nothing around it."""

from __future__ import annotations

from kubetorch.errors import KubernetesError, KubernetesUnavailableError
from kubetorch.k8s import pod_streams
from kubetorch.k8s.client import Client
from kubetorch.k8s.failures import Action
from kubetorch.k8s.pod_streams import PORT_DATA, PORT_ERROR, Channels
from kubetorch.k8s.resources import Ref


class PortStream:
    """One connection to a port of a pod; an asynchronous context manager."""

    def __init__(self, channels: Channels, action: Action, port: int) -> None:
        self._channels = channels
        self._action = action
        self._port = port
        #: The first message of each channel repeats the port.
        self._greeted: set[int] = set()
        self._complaint = b""
        self.received = 0

    async def __aenter__(self) -> PortStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def read(self) -> bytes:
        """The next bytes from the pod; none when it has ended the connection."""
        while (received := await self._channels.receive()) is not None:
            channel, data = received
            if channel not in self._greeted:
                self._greeted.add(channel)
            elif channel == PORT_DATA and data:
                self.received += len(data)
                return data
            elif channel == PORT_ERROR:
                self._complaint += data[:1000]
        if self._complaint:
            complaint = self._complaint.decode(errors="replace").strip()
            raise KubernetesError(
                f"cannot forward to port {self._port} ({self._action}): {complaint}",
                hint=f"does the pod run, and does something listen on its port {self._port}?",
            )
        return b""

    async def write(self, data: bytes) -> None:
        """Send bytes to the pod, as fast as it takes them."""
        try:
            await self._channels.send(PORT_DATA, data)
        except ConnectionResetError as error:
            raise KubernetesUnavailableError(f"{self._action}: {error}") from error

    async def close(self) -> None:
        """Close the connection."""
        await self._channels.close()


async def connect(client: Client, pod: Ref, port: int) -> PortStream:
    """Open a connection to a port of a pod.

    Whether anybody listens there is known only when something is read.
    """
    channels = Channels()
    return PortStream(channels, await pod_streams.connect_port(client, pod, port, channels), port)
