"""The agent's port: who may ask, its routes, calls by plain HTTP."""
