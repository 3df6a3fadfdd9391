"""Model folders and adapter folders: which configurations we compute, and which we refuse."""
