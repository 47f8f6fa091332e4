"""A tree is shared by tenants."""

from __future__ import annotations

from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.tenants.policies import TenantPolicies
from fastdeploy_cache.books.tenants.shares import Shares


def share_out(tree: PrefixTree, shares: Shares, policies: TenantPolicies) -> None:
    """Tenants have their shares from now on, and each a policy of its own. Before anything is cached."""
    residency, taps = tree.residency, tree.residency.taps
    tree.policy = residency.policy = policies
    residency.shares = shares
    taps.came, taps.left = (*taps.came, shares.came), (*taps.left, shares.left)
    taps.left_whole += (shares.left,)
    policies.clear(residency.is_leaf, tree.split)
