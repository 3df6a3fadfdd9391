"""The page that people see in a browser."""
