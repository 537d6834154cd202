"""Pods of a Kubernetes cluster, their secrets and volumes.

backend ──► preparing   what pods need before they can start: namespaces, attaching
   │   ──► applying    what there should be: objects, applied when they differ
   │   ──► watching    what there is: pods and their owners, as they change
   │   ──► statuses    one pod as `PodStatus`: pure
   └────► dooms        why a launch cannot succeed, or waits: pure
secrets, volumes        the backend's stores; storage_classes and refusals say why not: pure
"""
