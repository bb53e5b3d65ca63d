"""What is handed over after a training: its certificate (``privacy.json``), and the report that is made of it and the
ledger. Free of torch."""
