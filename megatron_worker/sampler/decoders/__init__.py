"""What the sampler needs of a decoder, and the one that is transformers' model."""
