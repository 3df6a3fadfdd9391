"""Forwards on sequences: inputs and outputs, packs of several, and heads on hidden states."""
