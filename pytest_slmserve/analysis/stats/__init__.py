"""Statistics that know nothing of serving: estimates, Student's t, group-sequential boundaries."""
