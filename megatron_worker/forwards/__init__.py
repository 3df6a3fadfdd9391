"""What is asked about sequences, and answered: inputs and outputs, packs of several, and heads on hidden states."""
