"""Tinker's API, below /tinker: requests of its SDK use sessions, published adapters and samplers."""
