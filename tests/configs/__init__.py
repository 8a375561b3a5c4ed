"""Tests of the jobs in configs/; pytest imports the modules beside them as a config does."""
