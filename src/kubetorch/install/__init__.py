"""Installing Kubetorch in a cluster, changing that, removing it, and checking that it works.

    chart (values, templates) ──► objects ──► releases ──► apply, readiness, remove

The chart is the one that helm installs. Here it is installed without helm: its templates are
rendered by a subset of Go's, and the applied objects are recorded in the cluster.
"""
