"""What a user declares: frozen, pure, comparable by value. No Kubernetes object, no I/O."""
