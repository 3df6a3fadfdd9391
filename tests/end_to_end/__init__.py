"""A package, so that its stacks are stopped behind its tests: pytest has no such scope for a folder without this."""
