"""Rows of users' files as typed examples, preference pairs and prompts."""

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's thoughts. They stand here, as the process of a chat template has no other module of this."""
