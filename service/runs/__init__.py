"""Runs behind the APIs: accepted, followed, shown."""
