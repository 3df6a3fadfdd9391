"""The parts of the decoder's layers: linears with adapters beside them, attention, experts."""
