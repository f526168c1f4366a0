"""From a user's images to a deployable model: the accuracy to expect at a new site, and calibrated confidence."""

COMPARED = ("lp-ln", "patchgen", "patchgen-cls")  # compared by `fit` by default, simplest first
BEST = "patchgen-cls"  # if nothing is compared
