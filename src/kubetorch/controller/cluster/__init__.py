"""The parts that only a controller in a Kubernetes cluster needs: state, election, access.

Nothing else may import from here, so that the local service does not pay for it.
"""
