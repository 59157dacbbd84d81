"""The checks: a file for each subject, a function for each check.

A check is a generator of findings. Its name is that of its function, with hyphens.
"""
