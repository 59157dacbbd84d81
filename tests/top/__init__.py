"""Tests of what is seen of a running job."""
