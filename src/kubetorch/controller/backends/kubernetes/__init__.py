"""Pods of a Kubernetes cluster, their secrets and volumes.

backend ──► prepare          what pods need before they can start: account, secrets, volumes
   │   ──► apply, objects   what there should be: objects, applied when they differ, or adopted
   │   ──► pods             what there is: pods as they change, and as `PodStatus`
   │   ──► pod_owners       which of them are a workload's, and which must end
   │   ──► launch_watch     what happens around pods, and the verdicts on launches
   └────► launch_failures   why a launch cannot succeed, or waits: pure
secrets, volumes             the backend's stores
"""
