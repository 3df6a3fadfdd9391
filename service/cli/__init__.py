"""The `longshore` command: a client of the native API, on this machine or another."""
