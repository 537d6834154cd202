"""Why a pod did not start, and why a launch cannot succeed or waits. No I/O.

`diagnosis` has the entry points: of a pod, of its owners, of a refused object.
"""
