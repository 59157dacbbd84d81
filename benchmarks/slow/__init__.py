"""Training over slow links: what rounding and local updates gain, and what they cost in loss."""
