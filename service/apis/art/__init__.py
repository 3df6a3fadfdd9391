"""OpenPipe ART's API."""
