"""Functions over measurements. Nothing here measures, and nothing needs a GPU."""
