"""What things cost. `python benchmarks/run.py` runs all of it; docs/performance.md has the figures."""
