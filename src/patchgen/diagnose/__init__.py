"""Measurements of a method or a trained model: what it costs, what it looks at, how its features lie."""
