"""On PYTHONPATH: a Python that has only what `pip install sdp-plugins[lightning]` brings.

What is installed for other tests, and imported by torchmetrics where it is found, would be a
third of a script's start.
"""

import sys
from importlib.machinery import PathFinder

HIDDEN = {"matplotlib", "scipy", "sklearn", "transformers"}


class LeanFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in HIDDEN else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, context):
        return () if context.name in HIDDEN else super().find_distributions(context)


sys.meta_path[sys.meta_path.index(PathFinder)] = LeanFinder
