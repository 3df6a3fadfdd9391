"""The API that OpenAI's clients speak, under `/v1`: translations of what the service does."""
