"""The commands of `longshore`, a module for each group."""
