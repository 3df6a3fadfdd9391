"""The sampler: a process that draws completions from a model and its adapters, bit-identical whatever else it draws.
For a machine's own runs and for tests; a vLLM server speaks the same protocol."""
