"""Everything that crosses a process boundary: routes, messages, frames, codecs, failures. Pure.

A type belongs here when two processes must agree on it, and nowhere else; what only one process
knows lies beside the code that owns it.
"""
