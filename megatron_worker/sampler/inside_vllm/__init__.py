"""Code that runs inside a vLLM server, in its environment. Only this folder is on its path."""
