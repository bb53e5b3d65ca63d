"""From the indices of a draw to physical batches."""
