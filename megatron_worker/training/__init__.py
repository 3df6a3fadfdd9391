"""The steps of a job around the engine: batches, frozen log-probabilities, evaluation, checkpoints."""
