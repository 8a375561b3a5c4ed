"""automicro inside the trainers that people already use, one module for each.

`automicro.integrations.transformers`, `.lightning`, `.accelerate` and `.keras` import their host,
and are imported where it is installed. See docs/integrations.
"""
