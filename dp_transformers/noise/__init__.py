"""How noise is drawn, and how it is added to gradients: what of a mechanism needs torch."""
