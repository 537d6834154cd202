"""Bringing code to a service: finding it, naming it, sending it, following what becomes of it."""
