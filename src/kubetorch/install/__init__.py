"""Installing Kubetorch in a cluster, changing that, removing it, and checking that it works.

    chart (values, templates) ──► objects ──► releases ──► apply, readiness, remove

The chart is the one that helm installs. What helm does for it is done here without helm: its
templates are rendered by a subset of Go's, and what was applied is recorded in the cluster.
"""
