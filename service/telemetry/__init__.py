"""A process's traces, metrics, and ids in its log. Traces and metrics are off by default."""
