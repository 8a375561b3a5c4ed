"""From gradients to parameters: unscale, clip and step once each, with memory reserved for it."""
