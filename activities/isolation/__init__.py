"""Isolation of strangers' code: bubblewrap or namespaces of our own, and beside either limits and a filter.

The processes inside run these modules with the standard library alone.
"""
