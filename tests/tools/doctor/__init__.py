"""Diagnosis of out-of-memory errors: snapshots of programs with planted causes."""
