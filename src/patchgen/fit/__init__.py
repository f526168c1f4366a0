"""From a user's images to a model that can be handed on: what to expect at a new site, and how sure it may sound."""

COMPARED = ("lp-ln", "patchgen-select")  # what `fit` compares unless told otherwise, simplest first
ALONE = "patchgen-select"  # where nothing can be compared
