"""Networks and how they act."""
