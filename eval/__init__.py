"""Drafter + live server -> report."""
