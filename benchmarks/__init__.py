"""Measurements beside other people's servers, run by hand: `python -m benchmarks.peers`."""
