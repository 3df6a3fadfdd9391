"""Functions on strangers' data, each call in a child process under limits."""
