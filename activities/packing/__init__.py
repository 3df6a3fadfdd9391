"""Plans of optimizer steps and bins for tokenized units; prefix trees."""
