"""Neurons of gated MLPs that compute the same function in four layers: search, null, identities, record."""
