"""Functions that compute statistics, metrics, points, curves, gates, claims and recommendations from records.

No function here measures, prints, or reads a file other than the package's own tables.
"""
