"""Programs that measure, one process per side.

They run under the interpreter of what they measure. Those that measure something else than this
checkout import no more than that has: the standard library, NumPy, and the peer itself.
"""
