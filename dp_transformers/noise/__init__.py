"""Draws noise and adds it to gradients: the part of a mechanism that needs torch."""
