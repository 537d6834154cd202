"""Apps: commands that run in a pod, and the way to their port. See docs/design/apps.md."""
