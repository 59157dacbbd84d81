"""`sdp doctor`: whether smddp is in use on this machine, how fast it is, and what slows it down."""
