"""Parts of a sample in this process: its CPU per call, beside that of a baseline."""
