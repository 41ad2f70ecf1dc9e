"""Output of the analysis for readers: tables, figures and texts. Nothing here decides a verdict."""
