"""Pods, secrets and volumes as objects of a cluster, through its API server."""
