"""From a user's images to a deployable model: the accuracy to expect at a new site, and calibrated confidence."""

COMPARED = ("lp-ln", "patchgen-select")  # what `fit` compares unless told otherwise, simplest first
ALONE = "patchgen-select"  # where nothing can be compared
