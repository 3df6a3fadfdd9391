"""The index: tenants, keys, files and runs in tables. Store and Temporal are the truth, and it is built from them."""
