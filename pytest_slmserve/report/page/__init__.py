"""The HTML report: one file with charts, tables and records, which needs no network."""
