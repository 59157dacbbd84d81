"""SMDDP's import names, for its scripts; what they mean is in ``sdp_plugins``.

``smdistributed`` itself is a namespace: other packages add to it.
"""
