"""Real data and small models that the configs and examples train, without a download."""
