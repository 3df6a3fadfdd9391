"""Rows of users' files as typed examples, preference pairs and prompts."""
