"""HTTP routes: each parses a request, calls a use case, and encodes the answer."""
