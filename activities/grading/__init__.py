"""Grading: one file a kind of grader, and the one place that chooses among them."""
