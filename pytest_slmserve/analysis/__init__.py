"""Functions over records: statistics, metrics, points, curves, gates, claims, advice. Nothing here measures, prints
or reads a file."""
