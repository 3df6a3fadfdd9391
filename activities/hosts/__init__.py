"""A GPU host's work: leases of worker processes, jobs on them, and their reports."""
