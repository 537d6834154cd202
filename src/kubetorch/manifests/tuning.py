"""Times that manifests give to Kubernetes."""

from __future__ import annotations

from kubetorch.lib.tuning import Table


class Timing(Table):
    """Times of pods; all in seconds."""

    #: Time that an agent's token is valid; the kubelet replaces it long before it ends.
    pod_token_seconds: int = 3600
    #: Pause between two startup probes; `launch_timeout` is counted in them.
    startup_probe_seconds: int = 5
    #: Time that a readiness probe waits: the agent of a pod that starts answers as late as that.
    pod_start_seconds: int = 600
    #: Time that a pod of an autoscaled Deployment has to finish its calls when it leaves.
    scaled_pod_grace_seconds: int = 300


TIMING = Timing()
