"""How much memory a micro-batch takes, and which micro-batches fit."""
