"""One HTML file for readers: the findings as charts and tables, with the records inside. It needs no network."""
