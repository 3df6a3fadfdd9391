"""A sampler host's work, and every request to a sampler."""
