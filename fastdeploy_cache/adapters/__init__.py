"""Interfaces for engines that are built otherwise: each is imported by its own name."""
