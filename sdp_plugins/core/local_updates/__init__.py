"""Ranks that train by themselves, and average what they have learnt every so many steps.

For any framework: what a model's parameters are is an adapter's matter (`parameters`).
"""
