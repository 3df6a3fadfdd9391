"""What the store keeps of runs: results, train steps, checkpoints; and what webhooks are told."""
