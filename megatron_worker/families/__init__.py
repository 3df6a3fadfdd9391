"""Parts of model families that torch computes: rotary embeddings, activations, choice of experts, rows of slices."""
