"""From gradient to parameters: unscale, clip, step, each once, with memory for it."""
