"""Certificate (``privacy.json``) and report of a training, made from its ledger. Free of torch."""
