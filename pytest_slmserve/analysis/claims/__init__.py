"""Claims of the research as data, and the functions that evaluate them on points and curves."""
