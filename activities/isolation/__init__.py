"""Isolation of untrusted code: bubblewrap or our own namespaces, each with limits and a filter of system calls.

The processes inside run these modules with the standard library alone.
"""
