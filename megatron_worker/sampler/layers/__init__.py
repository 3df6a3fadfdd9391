"""The parts of the decoder's layers: linears with adapters, attention, experts."""
