"""Whole samples: rows of the table of targets, each one run of `gateway bench`."""
