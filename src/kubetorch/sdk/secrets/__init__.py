"""Credentials of the user: declaring them, reading them, bringing them to services."""
