"""Long runs with random programs; the test suite runs short versions."""
