"""Temporal activities: one verb a file. Heavy libraries are imported inside functions, never here."""
