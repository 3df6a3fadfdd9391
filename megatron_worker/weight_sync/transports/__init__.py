"""How buckets travel: one file for each transport (protocol.py says what one is), and the table of all (table.py)."""
