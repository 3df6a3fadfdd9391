"""Garbage collection of the object store: what it holds, what policies expire, and deletion beside active runs."""
