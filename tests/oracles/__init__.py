"""Readable specifications of what the package computes by compiled walks over arrays."""
