"""What runs inside of a vLLM server, in its environment. On its path is this folder alone."""
