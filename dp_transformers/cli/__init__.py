"""The command line `dp-transformers`: plan a private training, check a model, train by a recipe, report on a run.

Commands import their dependencies when they run, so that `budget` and `report` load no torch.
"""
