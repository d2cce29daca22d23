"""Measure whole samples: each row of the table of targets is one run of `gateway bench`."""
