"""Stored records judged again: claims, gates, baselines, and whether two runs can be compared."""
