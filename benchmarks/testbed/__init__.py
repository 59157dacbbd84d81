"""A testbed: nodes that one machine plays, joined by links of a chosen speed."""
