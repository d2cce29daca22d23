"""Measure the steps of a sample in this process: CPU per call, beside a baseline."""
