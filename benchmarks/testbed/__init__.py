"""A testbed: nodes emulated on one machine, with links of a chosen speed."""
