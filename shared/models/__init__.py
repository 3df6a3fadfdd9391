"""Model folders and adapter folders: which configurations we support, and which we refuse."""
