"""The APIs of the web service, a folder each, and the middleware that all requests pass."""
