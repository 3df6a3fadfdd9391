"""The sampler: a small process that draws completions from a model and adapters beside it, to the bit the same whatever
else it does meanwhile. For a machine's own runs and for tests; a vLLM server speaks the same protocol."""
