"""Long runs with random programs; short versions of them are among the tests."""
