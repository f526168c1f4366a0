"""Continual category discovery (task `ccd`): a labelled stage, then stages in which new classes appear."""
