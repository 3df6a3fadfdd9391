"""The decoder interface of the sampler, and the decoder that uses transformers' model."""
