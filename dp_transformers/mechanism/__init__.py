"""What a run releases and what that costs, as values: no torch."""
