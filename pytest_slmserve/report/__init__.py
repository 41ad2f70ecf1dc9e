"""Output of the analysis for readers: tables, figures, texts and exports. Nothing here decides a verdict."""
