"""Hydra configuration files; schemas are in eagle3/config.py."""
