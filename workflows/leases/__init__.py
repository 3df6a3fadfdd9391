"""Leases of processes: of workers and samplers of runs, and of samplers that answer users."""
