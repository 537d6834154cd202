"""Pods, secrets and volumes as objects of a Kubernetes cluster.

    backend ──► applying   what there should be: objects, applied when they differ
       │   ──► watching    what there is: pods and their owners, as they change
       │   ──► statuses    one pod as `PodStatus`: pure
       └────► dooms        why a launch cannot succeed, or waits: pure

    secrets, volumes       the stores behind `controller.backends.stores`
"""
