"""Runs in W&B: one process of a host writes all of them."""
