"""What people read. Rounding happens here and nowhere else."""
