"""From a user's images to a model that can be handed on: what to expect at a new site, and how sure it may sound."""
