"""The HTML pages that commands write: one style sheet, one set of templates, nothing loaded from the network."""
