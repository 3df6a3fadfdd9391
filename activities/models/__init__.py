"""Models and adapters: checked before any GPU is asked for, and published afterwards."""
