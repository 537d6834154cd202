"""The places where pods run: `process` and `kubernetes`, by the protocol of `base`."""
