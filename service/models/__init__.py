"""What may be asked a question: published adapters, untrained models, and the samplers they sit on."""
