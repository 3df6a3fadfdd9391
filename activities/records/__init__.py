"""Records of runs in the store: results, train steps, checkpoints, deliveries of webhooks."""
