"""The contract between the control plane and the GPU workers: types, files and keys.

Imports nothing of Longshore outside this package, and no torch, Temporal or web framework.
"""
