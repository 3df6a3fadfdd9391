"""Frozen weights in 4 and 8 bits: how numbers become codes, and how is multiplied by them."""
