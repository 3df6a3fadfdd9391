"""From tokenized units to a plan of steps and bins."""
