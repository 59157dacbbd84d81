"""Tests of the flight recorder."""
