"""Side-by-side measurements of this package and of what people use today: see `benchmarks/compare.py`."""
