"""Processes and random generators."""
