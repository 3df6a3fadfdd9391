"""The log-probability head: torch and Triton, without ever holding [targets, vocabulary]."""
