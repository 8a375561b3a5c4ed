"""Real data and small models for configs and examples, without a download."""
