"""Tests that need an accelerator. Run by `make gpu`; see docs/benchmarks.md."""
