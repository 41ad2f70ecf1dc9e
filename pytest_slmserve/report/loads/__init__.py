"""Reports of single loads and of request rates, as `measure` prints them."""
