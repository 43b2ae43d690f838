"""The checks that `benchmarks/gpu_check.py` runs, one module each."""
