"""The object store: keys, artifacts, who may read what, and how much a tenant stores."""
