"""The keys of an installation: they encrypt everything that goes through Temporal, and sign statements."""
