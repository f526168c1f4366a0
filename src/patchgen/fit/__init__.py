"""From a user's images to a deployable model: the accuracy to expect at a new site, and calibrated confidence."""

COMPARED = ("lp-ln", "patchgen-select")  # compared by `fit` by default, simplest first
ALONE = "patchgen-select"  # if nothing can be compared
