"""automicro inside the trainers that people already use, one module for each.

`automicro.integrations.transformers`, `.lightning`, `.accelerate` and `.keras` import their host,
and are imported by whoever has it. See docs/integrations.
"""
