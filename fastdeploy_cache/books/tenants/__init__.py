"""Tenants: namespaces that have a share of each tier, what they use of it, and which of them loses blocks next."""
