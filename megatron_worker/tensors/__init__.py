"""Tensors in files, flat buffers, host copies and adapter slots, whichever engine holds them."""
