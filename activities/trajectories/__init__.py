"""From trajectory groups to units with advantages."""
