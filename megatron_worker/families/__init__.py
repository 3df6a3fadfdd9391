"""What torch computes of a family's parts: rotary embeddings, activations, the choice of experts, rows of slices."""
