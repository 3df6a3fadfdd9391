"""The stack on one machine, under one supervisor."""
