"""Files in and out, whole or in parts."""
