"""OpenAI's fine-tuning jobs: runs under other names."""
