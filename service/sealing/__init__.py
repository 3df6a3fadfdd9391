"""The keys of an installation: what goes through Temporal is sealed by them, and statements are signed."""
