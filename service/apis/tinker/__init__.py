"""Tinker's API, below /tinker: what its SDK asks is done by sessions, published adapters and samplers."""
