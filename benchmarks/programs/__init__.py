"""Programs that measure, one process per side.

They run under the interpreter of whatever they measure, so they import the standard library and
that alone.
"""
