"""Where pods run. `base` has the protocol; `process` and `kubernetes` are the two backends."""
