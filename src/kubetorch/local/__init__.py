"""The controller with the process backend as one background service of the user."""
