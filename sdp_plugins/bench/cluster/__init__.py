"""A laboratory for nodes: several of them on one machine, joined by links of a chosen speed."""
