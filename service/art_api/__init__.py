"""The API that OpenPipe ART's client speaks, under `/v1/preview`: models, checkpoints, training jobs."""
