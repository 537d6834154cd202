"""Where pods run. `base` has the protocol; each other module is one backend."""
