"""The local service: a controller with the process backend, one background process per user."""
