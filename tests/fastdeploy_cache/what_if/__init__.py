"""Tests of the process that estimates other sizes."""
