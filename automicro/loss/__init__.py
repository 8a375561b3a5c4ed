"""The loss: how a microbatch becomes one, what it averages over, and whether splitting is exact."""
