"""Sources of users' files and their downloads: paths, http(s), S3, the Hugging Face hub."""
