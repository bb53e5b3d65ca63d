"""Clipping where parameters are split over ranks. Here alone clipping speaks to other ranks."""
