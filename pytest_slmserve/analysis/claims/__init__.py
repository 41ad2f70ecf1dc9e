"""Claims of the research as data, and the functions that judge them on points and curves."""
