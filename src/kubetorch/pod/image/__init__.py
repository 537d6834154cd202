"""The environment that an image's steps make in a pod. See docs/design/images.md."""
