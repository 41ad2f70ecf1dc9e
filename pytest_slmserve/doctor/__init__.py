"""What this host can measure, and what would spoil it: one page, by jobs."""
