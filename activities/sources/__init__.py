"""Where a user's files are, and how they are brought here: paths, http(s), S3, the Hugging Face hub."""
