"""Measurements. Each writes rows to benchmarks/results/, with machine, versions, commit, date and command."""
