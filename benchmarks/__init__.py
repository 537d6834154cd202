"""Benchmarks: each figure beside its peer and its floor, measured in turns in the same run.

    python -m benchmarks NAME... [--json] [--check] [--rounds N]

A benchmark starts *programs* (`benchmarks.programs`), one process per side: ours, the peers, the
floors. Each program answers requests to measure itself, so that all sides are clocked by the same
code in a process of their own. What the figures mean and why each floor was chosen stands in
`docs/performance.md`.
"""
