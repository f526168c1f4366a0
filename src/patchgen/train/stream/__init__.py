"""The loop over a stream of stages (task `ccd`)."""
