"""Pods that are not there: a backend that names them, and sessions that say what they serve.

Everything between the two is real: the controller, its state, its server, the protocol.
"""
