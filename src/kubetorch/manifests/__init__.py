"""Specs → Kubernetes objects: pure functions that return dicts. No I/O."""
