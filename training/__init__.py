"""Store -> drafter."""
