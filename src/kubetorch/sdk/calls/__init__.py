"""Calling a service: one call, many, those that outlive the program, and where they go."""
