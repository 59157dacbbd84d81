"""Tests of `sdp doctor`: a fault for each check, real where that is possible."""
