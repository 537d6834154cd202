"""What only a controller in a Kubernetes cluster needs: its state, its election, its access.

Nothing else may import from here, so that the local service does not pay for it.
"""
