"""The paper's theory, measured: every inequality with its bound, the measured value, and whether it holds."""
