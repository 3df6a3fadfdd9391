"""What losses are made of: ratios and clips, divergences, aggregation, checked columns."""
