"""Measure what things cost. `python benchmarks/run.py` runs most of it; docs/performance.md has the figures."""
