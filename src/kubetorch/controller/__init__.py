"""One service: workloads, generations, rollouts, sessions of pods, blobs, idle stop.

Knows nothing of user code. The same controller runs on Kubernetes and as the local service.
"""
