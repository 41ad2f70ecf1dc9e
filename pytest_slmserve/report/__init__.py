"""Tables, charts and texts of analysis results for readers. No verdict is decided here."""
