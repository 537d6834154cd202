"""Pods as pods of a Kubernetes cluster."""
