"""What only an accelerator can show. Run by `make gpu`; see docs/benchmarks.md."""
