"""The parts of the decoder's layers: linears with adapters beside them, experts, delta nets."""
