"""The kubeconfig of another cluster."""

from pathlib import Path

import kubetorch as kt

# --- the example
compute = kt.Compute(kubeconfig_path="~/.kube/my-cluster")

# --- what is said of it
assert compute.kubeconfig_path == str(Path.home() / ".kube/my-cluster")
