"""What takes the place of attention, or of a layer, in megatron's model of some families."""
