"""Opacus's examples as one finds them in its repository, written anew: each module trains one model plainly, with this
library and with Opacus, on made-up data. `python -m benchmarks.opacus_examples` compares the three."""
