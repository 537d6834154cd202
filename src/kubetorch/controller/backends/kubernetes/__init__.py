"""Pods of a Kubernetes cluster.

backend ──► applying   what there should be: objects, applied when they differ
   │   ──► watching    what there is: pods and their owners, as they change
   └────► statuses     one pod as `PodStatus`: pure
"""
