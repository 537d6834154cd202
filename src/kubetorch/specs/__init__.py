"""The user's declarations: frozen, pure, comparable by value. No Kubernetes object, no I/O."""
