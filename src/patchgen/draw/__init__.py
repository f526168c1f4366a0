"""Maps over images, contact sheets and plots."""
