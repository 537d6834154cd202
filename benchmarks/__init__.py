"""Benchmarks: each figure beside its peer and its floor, measured in turns in the same run.

    python -m benchmarks all|NAME... [--json] [--check] [--rounds N]

Where calls are compared, each side (ours, a peer, a floor) is a *program* (`benchmarks.programs`):
a process that answers requests to measure itself, all clocked by the same code. Where commands are
compared, the benchmark starts and clocks them itself. What the figures mean and why each floor was
chosen stands in `docs/performance.md`.
"""
