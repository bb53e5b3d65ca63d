"""`python -m dp_transformers` is the command `dp-transformers`."""

from .cli.main import main

main()
