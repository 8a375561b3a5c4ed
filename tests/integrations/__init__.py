"""automicro inside the trainers of others."""
