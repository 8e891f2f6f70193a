"""Benchmarks: ``python -m benchmarks``. Every case checks the bytes too; docs/benchmarks.md says what each means."""
