"""Replacements for attention, or for a layer, in megatron's model, for some families."""
