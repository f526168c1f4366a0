"""Measurements of a method or a trained model: its cost, the patches it relies on, the geometry of its features."""
