"""Triton kernels, each beside a torch reference that gives the same numbers; choice.py says when which is used."""
